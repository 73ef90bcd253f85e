"""Attention of a few blocks each with its own pages: all (block, page) pairs of a batch at once.

The arithmetic is shared.py's, bit for bit.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from forkpoint.kernels.matmul.naive import bmm_fixed
from forkpoint.kernels.mla.blocks import SPLIT_PAGES, Blocks
from forkpoint.kernels.mla.shared import finite_max, row_ones
from forkpoint.limits import PAGE_TOKENS


@dataclass(frozen=True)
class PairPlan:
    """(block, page) pairs and their splits. Blocks with more splits come first; splits are laid out index by index."""

    order: Tensor
    """[B'] block of each place."""
    page_ids: Tensor
    """[T] page of each pair."""
    place: Tensor
    """[T] place, in `order`, of each pair's block."""
    first_keys: Tensor
    """[T] position of the first key of each pair's page."""
    absent: Tensor
    """Rows of the gathered pages, [T * 64] counted, that hold no token."""
    split: Tensor
    """[T] split of each pair."""
    split_pages: int
    """Most pages of any split."""
    page_in_split: Tensor
    """[T] split * split_pages + the page's number in its split."""
    split_place: Tensor
    """[splits] place of each split's block."""
    active: tuple[int, ...]
    """Blocks that have a split 0, 1, ...: always a prefix of `order`."""


@lru_cache(maxsize=8)
def pair_plan(sequences: tuple[Blocks, ...], device: torch.device) -> PairPlan:
    """Pairs of every block with every page of its sequence; pages after a block's last token weigh nothing there."""
    items = [(s.first + i, s) for s in sequences for i in range(s.count)]
    items.sort(key=lambda item: item[1].pages, reverse=True)
    counts = [-(-s.pages // SPLIT_PAGES) for _, s in items]
    active = [sum(c > j for c in counts) for j in range(counts[0])]
    offsets = [sum(active[:j]) for j in range(len(active))]
    used = min(SPLIT_PAGES, items[0][1].pages)
    pairs: list[tuple[int, int, int, int, int]] = []
    absent: list[int] = []
    for place, (_, s) in enumerate(items):
        for number, page in enumerate(s.table):
            split = offsets[number // SPLIT_PAGES] + place
            first_key = number * PAGE_TOKENS
            absent += range(
                len(pairs) * PAGE_TOKENS + min(s.end - first_key, PAGE_TOKENS), (len(pairs) + 1) * PAGE_TOKENS
            )
            pairs.append((page, place, first_key, split, split * used + number % SPLIT_PAGES))

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return PairPlan(
        order=index([block for block, _ in items]),
        page_ids=index([p[0] for p in pairs]),
        place=index([p[1] for p in pairs]),
        first_keys=index([p[2] for p in pairs]),
        absent=index(absent),
        split=index([p[3] for p in pairs]),
        split_pages=used,
        page_in_split=index([p[4] for p in pairs]),
        split_place=index([place for count in active for place in range(count)]),
        active=tuple(active),
    )


def _by_split(x: Tensor, plan: PairPlan, fill: float) -> Tensor:
    """Pairs' values [T, 16, X] as [splits, pages of a split, 16, X], `fill` where a split has no page."""
    rows = x.new_full((plan.split_place.numel() * plan.split_pages, *x.shape[1:]), fill)
    return rows.index_copy_(0, plan.page_in_split, x).view(-1, plan.split_pages, *x.shape[1:])


def _sum_ascending(x: Tensor) -> Tensor:
    total = x[:, 0]
    for page in range(1, x.shape[1]):
        total = total + x[:, page]
    return total


def ragged_attention(
    q: Tensor, positions: Tensor, sequences: tuple[Blocks, ...], pages: Tensor, r: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of the sequences' blocks, q [B, 16, D], positions [B, 16], pages [P, 64, D].

    Returns the numbers of those blocks [B'] and their rows [B', 16, r].
    """
    plan = pair_plan(sequences, q.device)
    blocks = plan.order[plan.place]
    keys = pages[plan.page_ids]
    keys.view(-1, keys.shape[2]).index_fill_(0, plan.absent, 0.0)
    scores = bmm_fixed(q[blocks], keys.transpose(1, 2)).mul_(scale)
    key = plan.first_keys[:, None] + torch.arange(PAGE_TOKENS, device=q.device)
    scores.masked_fill_(key[:, None, :] > positions[blocks][:, :, None], -torch.inf)
    m = _by_split(scores.amax(dim=2, keepdim=True), plan, -torch.inf).amax(dim=1)
    scores.sub_(finite_max(m)[plan.split]).exp_()
    attended = _sum_ascending(_by_split(bmm_fixed(scores, keys[:, :, :r]), plan, 0.0))
    total = _sum_ascending(_by_split(row_ones(scores), plan, 0.0))
    highest = m[: plan.active[0]].clone()
    first = plan.active[0]
    for count in plan.active[1:]:
        highest[:count] = torch.maximum(highest[:count], m[first : first + count])
        first += count
    weight = (m - highest[plan.split_place]).exp_()
    attended, total = attended * weight, total * weight
    numerator, denominator = attended[: plan.active[0]].clone(), total[: plan.active[0]].clone()
    first = plan.active[0]
    for count in plan.active[1:]:
        numerator[:count] += attended[first : first + count]
        denominator[:count] += total[first : first + count]
        first += count
    return plan.order, numerator / denominator
