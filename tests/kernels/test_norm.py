"""Norms against fp64, and a row alone against the row among others."""

import pytest
import torch

from forkpoint.kernels.norm.naive import gated_rms_norm, l2_norm, rms_norm
from tests.support.kernels import same_bytes


@pytest.mark.parametrize("width", [24, 128, 256, 7168])
def test_norms_agree_with_fp64(width: int) -> None:
    x, gate, weight = torch.randn(40, width) * 3, torch.randn(40, width), torch.randn(width)
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), normed, rtol=1e-6, atol=1e-7)
    gated = normed * gate.double().sigmoid()
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-5).double(), gated, rtol=1e-6, atol=1e-7)
    unit = wide / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(l2_norm(x).double(), unit, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("width", [24, 128, 256, 7168])
def test_a_normed_row_depends_on_that_row_alone(width: int) -> None:
    x, gate, weight = torch.randn(70, width), torch.randn(70, width), torch.randn(width)
    whole = rms_norm(x, weight, 1e-5), l2_norm(x), gated_rms_norm(x, gate, weight, 1e-5)
    for first, count in ((0, 1), (69, 1), (3, 5), (11, 40)):
        now = slice(first, first + count)
        assert same_bytes(rms_norm(x[now], weight, 1e-5), whole[0][now])
        assert same_bytes(l2_norm(x[now]), whole[1][now])
        assert same_bytes(gated_rms_norm(x[now], gate[now], weight, 1e-5), whole[2][now])


def test_heads_of_a_row_are_normed_apart() -> None:
    x = torch.randn(5, 3, 24)
    whole = l2_norm(x)
    assert same_bytes(whole[2, 1], l2_norm(x[2, 1].clone()))
    assert bool(torch.isfinite(l2_norm(torch.zeros(2, 24))).all())
