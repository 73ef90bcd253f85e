"""Which programs attend to a packed batch: blocks of (token, head) rows, times splits of keys.

A block's rows are those of one sequence, tokens outside, heads inside, so any number of heads fills it. Which rows
share a block, and how many splits the block walks, changes no bit of a row (kernels/mla/triton says why). The cuts
between splits are absolute positions, whatever the batch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from forkpoint.limits import PAGE_TOKENS

TIERS: Final = ((4096, 1024), (None, 2048))
"""(position, size): up to that position, keys are split every `size` tokens. Short splits keep a short context's few
programs busy; long ones bound the partial results, 2 KB a row and split, which would else outweigh the keys (ADR 0008).
"""
RECORD: Final = 8
"""int32 values of an item: row of q (heads counted) that its block begins with, number of that row in its sequence,
position of the sequence's first row, and behind its last row, position of the item's first key, pages, place in
`tables` of the first page, slot of its partial results."""


@dataclass(frozen=True)
class Work:
    """One launch of the split kernel and of the combine kernel."""

    records: Tensor
    """int32 [W, 8], see RECORD; long items first, so that programs that take turns end together; of equally long ones,
    those of one split lie side by side, so that their keys are read from the L2 cache."""
    blocks: Tensor
    """int32 [B, 4]: row of q that the block begins with, its rows, slot of its first split, number of splits."""


@dataclass(frozen=True)
class _Tier:
    """Splits of one size: the first of them, in number and position, and the position behind the last (or none)."""

    first: int
    start: int
    end: int | None
    size: int


def _tiers(tiers: Sequence[tuple[int | None, int]]) -> list[_Tier]:
    made: list[_Tier] = []
    first = start = 0
    for end, size in tiers:
        if size % PAGE_TOKENS or (end is not None and (end - start) % size):
            raise ValueError(f"splits of {size} tokens from {start} to {end} do not end at pages")
        made.append(_Tier(first, start, end, size))
        if end is not None:
            first, start = first + (end - start) // size, end
    return made


@dataclass(frozen=True)
class _Blocks:
    """All blocks of a batch, [B] each: sequence, number in it, splits up to its last row, position of that row."""

    sequence: Tensor
    number: Tensor
    splits: Tensor
    last: Tensor

    @staticmethod
    def of(facts: Tensor, heads: int, rows: int, tiers: list[_Tier]) -> "_Blocks":
        places = facts[:, 1] * heads
        counts = (places + rows - 1) // rows
        sequence = torch.repeat_interleave(torch.arange(len(facts)), counts)
        number = within(counts)
        place = torch.minimum((number + 1) * rows, places[sequence]) - 1
        last = facts[sequence, 2] + place // heads
        splits = torch.zeros_like(last)
        for tier in tiers:
            reached = (last + 1 - tier.start).clamp(min=0, max=None if tier.end is None else tier.end - tier.start)
            splits += (reached + tier.size - 1) // tier.size
        return _Blocks(sequence, number, splits, last)

    def launches(self, items_max: int) -> Iterator["_Blocks"]:
        """Runs of blocks of at most `items_max` items, or of one block."""
        ends = self.splits.cumsum(0)
        first, before = 0, 0
        while first < len(ends):
            end = int(torch.searchsorted(ends, before + items_max, right=True))
            end = max(end, first + 1)
            now = slice(first, end)
            yield _Blocks(self.sequence[now], self.number[now], self.splits[now], self.last[now])
            first, before = end, int(ends[end - 1])

    def work(self, facts: Tensor, heads: int, rows: int, tiers: list[_Tier]) -> tuple[Tensor, Tensor]:
        """Records and blocks of one launch."""
        line = facts[self.sequence, 0] * heads + self.number * rows
        inside = torch.clamp(facts[self.sequence, 1] * heads - self.number * rows, max=rows)
        first_slot = self.splits.cumsum(0) - self.splits
        blocks = torch.stack([line, inside, first_slot, self.splits], dim=1)
        item = torch.repeat_interleave(torch.arange(len(self.splits)), self.splits)
        split = within(self.splits)
        key, size = torch.zeros_like(split), torch.zeros_like(split)
        for tier in tiers:
            here = split >= tier.first
            key = torch.where(here, tier.start + (split - tier.first) * tier.size, key)
            size = torch.where(here, tier.size, size)
        pages = torch.minimum(key + size - 1, self.last[item]) // PAGE_TOKENS + 1 - key // PAGE_TOKENS
        _, count, start, table = facts[self.sequence[item]].unbind(dim=1)
        columns = [
            line[item], self.number[item] * rows, start, start + count, key, pages, table + key // PAGE_TOKENS,
            first_slot[item] + split,
        ]  # fmt: skip
        place = self.sequence[item] * (int(self.splits.max()) + 1) + split
        order = torch.argsort(place - pages * (int(place.max()) + 1), stable=True)
        return torch.stack(columns, dim=1)[order], blocks


def within(counts: Tensor) -> Tensor:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, ..."""
    ends = counts.cumsum(0)
    return torch.arange(int(counts.sum())) - torch.repeat_interleave(ends - counts, counts)


@dataclass(frozen=True)
class Works:
    """A batch for one model and one block size, cut into launches that fit the workspace."""

    launches: tuple[Work, ...]
    items_max: int
    """Most items of a launch: slots of partial results to have room for."""


def works_of(
    facts: Tensor, tiers: Sequence[tuple[int | None, int]], heads: int, rows: int, items_max: int
) -> tuple[list[Tensor], int]:
    """Records and blocks of each launch, one after another, and the most items of one."""
    made = _tiers(tiers)
    parts: list[Tensor] = []
    largest = 0
    for run in _Blocks.of(facts, heads, rows, made).launches(items_max):
        records, blocks = run.work(facts, heads, rows, made)
        parts += [records.int(), blocks.int()]
        largest = max(largest, records.shape[0])
    return parts, largest


def paired(parts: list[Tensor]) -> tuple[Work, ...]:
    return tuple(Work(records, blocks) for records, blocks in zip(parts[::2], parts[1::2], strict=True))
