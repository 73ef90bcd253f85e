"""The gated activations: against fp64 and at their ends."""

import pytest
import torch

from forkpoint.kernels.ffn.activation import SILU, Activation
from forkpoint.kernels.ffn.naive import glu
from tests.support.kernels import same_bytes

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("beta", [1.0, 4.0])
@pytest.mark.parametrize("linear_beta", [None, 2.0, 25.0])
def test_situ_agrees_with_fp64(beta: float, linear_beta: float | None) -> None:
    gate, up = torch.randn(2000) * 8, torch.randn(2000) * 30
    wide = up.double() if linear_beta is None else linear_beta * torch.tanh(up.double() / linear_beta)
    expected = beta * torch.tanh(gate.double() / beta) * torch.sigmoid(gate.double()) * wide
    got = glu(gate, up, Activation("situ", beta, linear_beta)).double()
    torch.testing.assert_close(got, expected, rtol=2e-6, atol=1e-30)


def test_silu_agrees_with_fp64_and_reads_no_beta() -> None:
    gate, up = torch.randn(2000) * 8, torch.randn(2000) * 30
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(glu(gate, up, SILU).double(), expected, rtol=2e-6, atol=1e-30)
    assert same_bytes(glu(gate, up, Activation("silu", 3.0, 7.0)), glu(gate, up, SILU))


def test_situ_is_bounded_whatever_its_inputs() -> None:
    ends = torch.tensor([-torch.inf, -LARGEST, -1e4, -90.0, -0.0, 0.0, 90.0, 1e4, LARGEST, torch.inf])
    gate, up = torch.meshgrid(ends, ends, indexing="ij")
    got = glu(gate, up, Activation("situ", 4.0, 25.0))
    assert bool(got.isfinite().all())
    assert float(got.abs().max()) == 100.0
    assert torch.equal(
        got[-1], torch.tensor([-100.0] * 3 + [4.0 * 25.0 * v for v in torch.tanh(ends[3:7] / 25.0)] + [100.0] * 3)
    )
    assert bool((got[:3] == 0).all())
