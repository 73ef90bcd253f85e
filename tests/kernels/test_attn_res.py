"""The mixture of Attention Residuals: against fp64, at its edges, and a row alone against the row among others."""

import pytest
import torch
from torch import Tensor

from forkpoint.kernels.attn_res.naive import mix
from tests.support.kernels import same_bytes

EPS = 1e-5


def in_fp64(bank: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    sources = torch.cat([bank, x[None]]).double()
    keys = sources / (sources.square().mean(-1, keepdim=True) + EPS).sqrt()
    return ((keys @ weight.double()).softmax(0)[..., None] * sources).sum(0)


@pytest.mark.parametrize("entries", [1, 2, 8])
@pytest.mark.parametrize("width", [24, 7168])
def test_the_mixture_agrees_with_fp64(entries: int, width: int) -> None:
    bank, x, weight = torch.randn(entries, 11, width) * 3, torch.randn(11, width), torch.randn(width) / width**0.5
    torch.testing.assert_close(mix(bank, x, weight, EPS).double(), in_fp64(bank, x, weight), rtol=2e-5, atol=2e-6)


def test_a_source_alone_is_itself() -> None:
    x = torch.randn(5, 24)
    assert torch.equal(mix(x.new_empty(0, 5, 24), x, torch.randn(24), EPS), x)


def test_sources_of_equal_scores_have_equal_shares() -> None:
    bank, x = torch.randn(3, 5, 64), torch.randn(5, 64)
    shares = mix(bank, x, torch.zeros(64), EPS)
    torch.testing.assert_close(shares, torch.cat([bank, x[None]]).mean(0))


def test_of_huge_scores_the_largest_takes_all() -> None:
    """Differences of scores far beyond what exp holds: the others' shares are zero, nothing is infinite."""
    bank, weight = torch.randn(2, 4, 64), torch.zeros(64)
    bank[0, :, 0], bank[1, :, 0] = 5.0, -5.0
    x = torch.randn(4, 64)
    x[:, 0] = 0.0
    weight[0] = 1e6
    assert torch.equal(mix(bank, x, weight, EPS), bank[0])
    assert torch.equal(mix(bank, x, -weight, EPS), bank[1])


def test_rows_of_zeros_score_zero_and_stay_numbers() -> None:
    zeros, x, weight = torch.zeros(2, 3, 64), torch.randn(3, 64), torch.randn(64) / 8
    assert torch.equal(mix(zeros, zeros[0], weight, EPS), zeros[0])
    torch.testing.assert_close(mix(zeros, x, weight, EPS).double(), in_fp64(zeros, x, weight), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("width", [24, 2304])
def test_a_row_of_the_mixture_depends_on_that_row_alone(width: int) -> None:
    bank, x, weight = torch.randn(3, 41, width), torch.randn(41, width), torch.randn(width) / width**0.5
    whole = mix(bank, x, weight, EPS)
    for rows in (slice(0, 1), slice(40, 41), slice(3, 20), slice(1, 41)):
        assert same_bytes(mix(bank[:, rows], x[rows], weight, EPS), whole[rows])
        assert same_bytes(mix(bank[:, rows].contiguous(), x[rows].clone(), weight, EPS), whole[rows])
    turned = torch.randperm(41)
    assert same_bytes(mix(bank[:, turned], x[turned], weight, EPS), whole[turned])
    bank[:, 7], x[9] = torch.nan, torch.inf
    others = torch.tensor([row for row in range(41) if row not in (7, 9)])
    assert same_bytes(mix(bank, x, weight, EPS)[others], whole[others])


def test_entries_behind_the_bank_are_not_read() -> None:
    """The bank is a view of room for all blocks."""
    room, x, weight = torch.full((4, 6, 24), torch.nan), torch.randn(6, 24), torch.randn(24)
    room[:2] = torch.randn(2, 6, 24)
    assert same_bytes(mix(room[:2], x, weight, EPS), mix(room[:2].clone(), x, weight, EPS))
