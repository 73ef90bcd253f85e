"""The mixture of Attention Residuals in Triton: a row alone is the row of a batch, and both are the definition."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.attn_res import naive
from forkpoint.kernels.attn_res import triton as attn_res
from forkpoint.kernels.norm.naive import rms_norm
from tests.support.triton_shim import DEVICE

EPS = 1e-5
FP32, BF16 = torch.float32, torch.bfloat16


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def operands(sources: int, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """bank, x, delta, mix and weight; sources of very different size, and scores that are."""
    sizes = torch.logspace(-1, 2, max(sources, 1), device=DEVICE)[:sources, None, None]
    bank = noise(sources, rows, width, seed=1) * sizes
    return (
        bank,
        noise(rows, width, seed=2),
        noise(rows, width, seed=3).to(BF16),
        noise(width, seed=4) * 3 * width**-0.5,
        1 + 0.1 * noise(width, seed=5),
    )


@pytest.mark.parametrize(("sources", "width"), [(1, 64), (8, 100), (3, 1025)])
def test_the_mixture_and_its_norm_are_the_definition(sources: int, width: int) -> None:
    bank, x, delta, mix, weight = operands(sources, 3, width)
    total, ours = attn_res.mix_norm(bank, x, delta, mix, weight, EPS)
    assert torch.equal(total, x + delta)
    mixed = naive.mix(bank.double(), (x + delta).double(), mix.double(), EPS)
    torch.testing.assert_close(ours.double(), rms_norm(mixed, weight.double(), EPS), rtol=1e-5, atol=1e-5)
    assert torch.equal(attn_res.mix_norm(bank, x, delta, mix, weight, EPS, BF16)[1], ours.to(BF16))


def test_a_row_is_the_same_alone_among_others_and_beside_poison() -> None:
    bank, x, delta, mix, weight = operands(3, 5, 100)
    total, whole = attn_res.mix_norm(bank, x, delta, mix, weight, EPS)
    order = torch.tensor([4, 1], device=DEVICE)
    for part in (slice(2, 3), order):
        again = attn_res.mix_norm(bank[:, part], x[part], delta[part], mix, weight, EPS)
        assert torch.equal(again[0], total[part])
        assert torch.equal(again[1], whole[part])
    room = torch.full((4, 6, 128), torch.nan, device=DEVICE)
    room[:3, :5, 3:103] = bank
    poisoned = x.clone()
    poisoned[0] = torch.nan
    beside = attn_res.mix_norm(room[:3, :5, 3:103], poisoned, delta, mix, weight, EPS)[1]
    assert beside[0].isnan().all()
    assert torch.equal(beside[1:], whole[1:])


def test_a_sum_that_was_stored_before_gives_the_same_mixture() -> None:
    bank, x, delta, mix, weight = operands(2, 3, 64)
    total, whole = attn_res.mix_norm(bank, x, delta, mix, weight, EPS)
    assert torch.equal(attn_res.mix_norm(bank, total, None, mix, weight, EPS)[1], whole)


def test_one_source_is_itself_whatever_its_score() -> None:
    bank, x, _, mix, weight = operands(0, 3, 64)
    mixed = attn_res.mix_norm(bank, x, None, mix, weight, EPS)[1]
    torch.testing.assert_close(mixed, rms_norm(x.double(), weight.double(), EPS).float(), rtol=1e-5, atol=1e-6)


def test_the_mixture_of_no_rows_is_empty() -> None:
    bank, x, delta, mix, weight = operands(2, 0, 64)
    assert attn_res.mix_norm(bank, x, delta, mix, weight, EPS)[1].shape == (0, 64)


def test_the_mixture_says_why_it_refuses() -> None:
    bank, x, delta, mix, weight = operands(2, 3, 64)
    assert attn_res.why_not(bank, x, mix, weight, delta) is None
    assert "[n, R, D]" in str(attn_res.why_not(bank[:, :2], x))
    assert "another operand" in str(attn_res.why_not(bank, x, mix[:32]))
    wide = torch.empty(1, 20_000)
    assert "16384" in str(attn_res.why_not(wide[None], wide))
    with pytest.raises(ValueError, match="delta has shape"):
        attn_res.mix_norm(bank, x, delta[:2], mix, weight, EPS)
