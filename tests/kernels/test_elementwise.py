"""The elementwise functions against fp64, at their edges too."""

import math

import torch

from forkpoint.kernels.elementwise import GATE_ONE, pow2_fixed, power_of_two, sigmoid, silu, softplus, tanh


def test_they_agree_with_fp64() -> None:
    x = torch.linspace(-60, 60, 100_001)
    wide = x.double()
    torch.testing.assert_close(sigmoid(x).double(), wide.sigmoid(), rtol=5e-7, atol=1e-30)
    torch.testing.assert_close(silu(x).double(), torch.nn.functional.silu(wide), rtol=5e-7, atol=1e-30)
    torch.testing.assert_close(
        softplus(x).double(), torch.nn.functional.softplus(wide, threshold=700), rtol=5e-7, atol=0
    )
    torch.testing.assert_close(tanh(x).double(), wide.tanh(), rtol=5e-7, atol=0)


def test_they_are_finite_where_exp_overflows() -> None:
    x = torch.tensor([-1e4, -89.0, 89.0, 1e4])
    assert sigmoid(x).tolist() == [0.0, 0.0, 1.0, 1.0]
    assert bool(torch.isfinite(silu(x)).all())
    assert softplus(x).tolist()[2:] == [89.0, 1e4]


def test_they_leave_their_operand_alone() -> None:
    x = torch.randn(50)
    before = x.clone()
    for function in (sigmoid, silu, softplus):
        function(x)
        assert torch.equal(x, before)


def test_a_power_of_two_is_exact_over_the_whole_range() -> None:
    exponent = torch.arange(-140, 140, dtype=torch.int32)
    expected = [math.ldexp(1.0, e) if -126 <= e <= 127 else (0.0 if e < 0 else math.inf) for e in range(-140, 140)]
    assert power_of_two(exponent).tolist() == expected


def test_a_fixed_point_power_agrees_with_fp64() -> None:
    n = torch.randint(-120 * GATE_ONE, 120 * GATE_ONE, (100_000,), dtype=torch.int32)
    expected = torch.exp2(n.double() / GATE_ONE)
    torch.testing.assert_close(pow2_fixed(n).double(), expected, rtol=2e-7, atol=0)
    assert pow2_fixed(torch.zeros(3, dtype=torch.int32)).tolist() == [1.0, 1.0, 1.0]


def test_an_integer_shift_moves_no_mantissa_bit() -> None:
    n = torch.randint(-60 * GATE_ONE, 0, (10_000,), dtype=torch.int32)
    shifts = torch.randint(-30, 30, (10_000,), dtype=torch.int32)
    assert torch.equal(pow2_fixed(n, shifts), pow2_fixed(n) * power_of_two(shifts))
    assert torch.equal(pow2_fixed(n, 50), pow2_fixed(n) * 2.0**50)


def test_a_power_below_the_smallest_normal_number_is_zero_and_a_huge_one_is_infinite() -> None:
    n = torch.tensor([-127 * GATE_ONE, -126 * GATE_ONE, -400 * GATE_ONE, 128 * GATE_ONE], dtype=torch.int32)
    assert pow2_fixed(n).tolist() == [0.0, 2.0**-126, 0.0, math.inf]
