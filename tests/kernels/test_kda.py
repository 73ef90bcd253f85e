"""KDA's gate and tile form against fp64, over every kind of gate and over keys that repeat."""

import math

import pytest
import torch

from forkpoint.kernels.elementwise import GATE_ONE
from forkpoint.kernels.kda.naive import GATE_FLOOR, kda_gate, recurrent_kda
from tests.support.kernels import GATES, feed_alone, kda_inputs, relative_rmse

TOKENS, HEADS = 83, 2


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("keys,values", [(128, 128), (16, 24), (32, 16), (8, 4), (20, 12)])
def test_the_tile_form_agrees_with_the_fp64_recurrence(keys: int, values: int, gate: str) -> None:
    inputs = kda_inputs(TOKENS, HEADS, keys, values, GATES[gate])
    o, pool = feed_alone(inputs, [80, 3])
    expected, _ = inputs.reference()
    assert relative_rmse(o, expected) < 1e-6
    # S stands at the last grid point, 80.
    q, k, v = inputs.q[:80].double(), inputs.k[:80].double(), inputs.v[:80].double()
    log_decay = inputs.g[:80].double() * (math.log(2.0) / GATE_ONE)
    _, state = recurrent_kda(q, k, v, log_decay, inputs.beta[:80].double(), inputs.initial_state.double())
    assert relative_rmse(pool.S[1], state) < 1e-6


@pytest.mark.parametrize("gate", GATES)
def test_keys_that_repeat_cost_little_accuracy(gate: str) -> None:
    """Runs of one byte give nearly equal keys, strong beta and weak decay: the worst case for the inverse of a tile."""
    z = torch.full((96, HEADS, 64), -9.0)
    inputs = kda_inputs(96, HEADS, 64, 64, GATES[gate], z=z, repeated_keys=True)
    o, pool = feed_alone(inputs, [96])
    expected, state = inputs.reference()
    assert relative_rmse(o, expected) < 5e-6
    assert relative_rmse(pool.S[1], state) < 5e-6


EXTREMES = {
    "the floor everywhere": (torch.full((64, HEADS, 32), 1e4), torch.full((HEADS,), 4.0)),
    "the floor on half the channels": (torch.tensor([1e4, -8.0]).repeat(64, HEADS, 16), torch.full((HEADS,), 4.0)),
    "the floor on every third token": (torch.tensor([1e4, -8.0, -8.0]).repeat(22)[:64, None, None].repeat(1, HEADS, 32),
                                       torch.full((HEADS,), 4.0)),
    "hardly any decay": (torch.full((64, HEADS, 32), -14.0), torch.zeros(HEADS)),
    "a fast rate": (torch.linspace(-3, 3, 64)[:, None, None].repeat(1, HEADS, 32), torch.full((HEADS,), math.log(64))),
}  # fmt: skip


@pytest.mark.parametrize("lower_bound", [-5.0, -5.37, -5.4, -10.0, -16.6, None], ids=str)
@pytest.mark.parametrize("name", EXTREMES)
def test_extreme_gates_stay_finite_and_accurate(name: str, lower_bound: float | None) -> None:
    z, rates = EXTREMES[name]
    inputs = kda_inputs(64, HEADS, 32, 16, lower_bound, z=z, A_log=rates)
    o, pool = feed_alone(inputs, [64])
    expected, state = inputs.reference()
    assert bool(torch.isfinite(o).all()) and bool(torch.isfinite(pool.S[1]).all())
    assert relative_rmse(o, expected) < 3e-6
    assert relative_rmse(pool.S[1], state) < 3e-6


def test_gates_agree_with_their_formulas_in_fp64() -> None:
    z, rates, bias = torch.randn(50, 3, 40) * 4, torch.rand(3) * 2, torch.randn(3, 40)
    shifted, rate = z.double() + bias.double(), rates.double().exp()[:, None]
    softplus = -rate * torch.nn.functional.softplus(shifted, threshold=700)
    expected = (softplus / math.log(2)).clamp(min=GATE_FLOOR) * GATE_ONE
    torch.testing.assert_close(kda_gate(z, rates, bias, None).double(), expected, rtol=6e-7, atol=1.0)
    bounded = -5.0 * (rate * shifted).sigmoid() / math.log(2) * GATE_ONE
    torch.testing.assert_close(kda_gate(z, rates, bias, -5.0).double(), bounded, rtol=6e-7, atol=1.0)


def test_slow_gates_keep_their_digits() -> None:
    """A gate of 3e-6 a token decides what is forgotten after a million tokens: the grid of 2^-22 must hold it."""
    z = torch.full((1, 1, 1), -12.7)
    gate = int(kda_gate(z, torch.zeros(1), torch.zeros(1, 1), None))
    exact = -math.log1p(math.exp(-12.7)) / math.log(2) * GATE_ONE
    assert gate == round(exact) != 0


def test_gates_never_grow_a_state_and_never_pass_the_floor() -> None:
    z = torch.tensor([-1e30, -100.0, 0.0, 100.0, 1e30]).view(5, 1, 1)
    for lower_bound in (None, -5.0):
        gates = kda_gate(z, torch.full((1,), 3.0), torch.zeros(1, 1), lower_bound)
        assert int(gates.max()) == 0 and int(gates.min()) >= GATE_FLOOR * GATE_ONE


@pytest.mark.parametrize("lower_bound", [0.0, 1.0, -17.0])
def test_a_bound_that_a_tile_cannot_hold_is_refused(lower_bound: float) -> None:
    with pytest.raises(ValueError, match=r"lower_bound must lie in \[-16.64, 0\)"):
        kda_gate(torch.zeros(1, 1, 1), torch.zeros(1), torch.zeros(1, 1), lower_bound)


def test_the_recurrence_changes_none_of_its_arguments() -> None:
    inputs = kda_inputs(5, 1, 8, 4, None)
    before = inputs.initial_state.clone()
    inputs.reference()
    recurrent_kda(inputs.q, inputs.k, inputs.v, inputs.g.float() / GATE_ONE, inputs.beta, inputs.initial_state)
    assert torch.equal(inputs.initial_state, before)
