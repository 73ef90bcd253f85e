"""Which programs attend to a packed batch: blocks of (token, head) rows, times splits of keys; and where rows go.

A block's rows are those of one sequence, tokens outside, heads inside, so any number of heads fills it. Which rows
share a block, and how many splits the block walks, changes no bit of a row (kernels/mla/triton says why). The cuts
between splits are absolute positions, whatever the batch.

A plan is made once a step from the scheduler's lists, copied to the device in one piece, and used by every layer.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.tables import one_copy
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
        number = _within(counts)
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
        split = _within(self.splits)
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


def _within(counts: Tensor) -> Tensor:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, ..."""
    ends = counts.cumsum(0)
    return torch.arange(int(counts.sum())) - torch.repeat_interleave(ends - counts, counts)


@dataclass(frozen=True)
class Works:
    """A batch for one model and one block size, cut into launches that fit the workspace."""

    launches: tuple[Work, ...]
    items_max: int
    """Most items of a launch: slots of partial results to have room for."""


@dataclass
class MlaPlan:
    """One step's packed rows, page tables and work, on the device. Make it with `plan`; it does not change."""

    device: torch.device
    facts: Tensor
    """int64 [N, 4] on the host: first packed row, rows, position of the first, place of its table in `tables`."""
    tables: Tensor
    """int32: all page tables, end to end, each up to the page of its sequence's last row."""
    places: Tensor
    """int32 [R]: page * 64 + row of the page that a packed row's latents go to."""
    tiers: Sequence[tuple[int | None, int]] = TIERS
    _works: dict[tuple[int, int, int], Works] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Packed rows of the batch."""
        return self.places.shape[0]

    def works(self, heads: int, rows: int, items_max: int) -> Works:
        """Blocks of `rows` for a model of `heads`, in launches of at most `items_max` items; made on the first call."""
        key = (heads, rows, items_max)
        if key not in self._works:
            hosted, largest = _works(self.facts, self.tiers, *key)
            self._works[key] = Works(_paired(one_copy(hosted, self.device)), largest)
        return self._works[key]


def _works(
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


def _paired(parts: list[Tensor]) -> tuple[Work, ...]:
    return tuple(Work(records, blocks) for records, blocks in zip(parts[::2], parts[1::2], strict=True))


@dataclass(frozen=True)
class HostPlan:
    """A plan on the host, before its one copy to the device."""

    facts: Tensor
    tables: Tensor
    places: Tensor
    tiers: Sequence[tuple[int | None, int]]
    works: dict[tuple[int, int, int], tuple[list[Tensor], int]]
    """By the arguments of `MlaPlan.works`: records and blocks of its launches in turn, and the most items of one."""

    @staticmethod
    def of(
        page_tables: Sequence[Sequence[int]],
        cu_seqlens: Sequence[int],
        starts: Sequence[int],
        works: Sequence[tuple[int, int, int]] = (),
        tiers: Sequence[tuple[int | None, int]] = TIERS,
    ) -> "HostPlan":
        """Arguments and errors as of `plan`."""
        sequences: list[tuple[int, int, int, int]] = []
        flat = array("i")
        for table, (first, last), start in zip(page_tables, pairwise(cu_seqlens), starts, strict=True):
            tokens = start + last - first
            pages = -(-tokens // PAGE_TOKENS) if last > first else 0
            if len(table) < pages:
                raise ValueError(f"a sequence of {tokens} tokens needs {pages} pages, its table has {len(table)}")
            sequences.append((first, last - first, start, len(flat)))
            flat.extend(table[:pages])
        facts = torch.tensor(sequences, dtype=torch.int64).view(-1, 4)
        tables = torch.frombuffer(flat, dtype=torch.int32) if flat else torch.empty(0, dtype=torch.int32)
        made = {key: _works(facts, tiers, *key) for key in works}
        return HostPlan(facts, tables, _places(facts, tables).int(), tiers, made)

    @property
    def launches(self) -> int:
        """Of all works together."""
        return sum(len(hosted) for hosted, _ in self.works.values()) // 2

    def padded(self) -> "HostPlan":
        """The same plan with tables and records of fewer different lengths. Every work has one launch.

        The records that are added do again what the shortest one does, each into a place for partial results of its
        own, which nothing reads.
        """
        tables = torch.zeros(1 << max(0, len(self.tables) - 1).bit_length(), dtype=torch.int32)
        tables[: len(self.tables)] = self.tables
        works = {}
        for key, ((records, blocks), items) in self.works.items():
            more = records[-1:].repeat(_rounded_up(items) - items, 1)
            more[:, -1] = torch.arange(items, items + len(more))
            works[key] = [torch.cat([records, more]), blocks], items + len(more)
        return replace(self, tables=tables, works=works)

    def parts(self) -> list[Tensor]:
        """What goes to the device."""
        return [self.tables, self.places, *(part for hosted, _ in self.works.values() for part in hosted)]

    def there(self, parts: Sequence[Tensor]) -> MlaPlan:
        """The plan whose `parts` are on the device."""
        made = MlaPlan(parts[0].device, self.facts, parts[0], parts[1], self.tiers)
        rest = list(parts[2:])
        for key, (hosted, largest) in self.works.items():
            made._works[key] = Works(_paired(rest[: len(hosted)]), largest)
            rest = rest[len(hosted) :]
        return made


def _rounded_up(count: int) -> int:
    """The next of eight steps an octave: at most an eighth more."""
    step = 1 << max(0, (count - 1).bit_length() - 4)
    return -(-count // step) * step


def plan(
    page_tables: Sequence[Sequence[int]],
    cu_seqlens: Sequence[int],
    starts: Sequence[int],
    device: torch.device | str,
    works: Sequence[tuple[int, int, int]] = (),
    tiers: Sequence[tuple[int | None, int]] = TIERS,
) -> MlaPlan:
    """Plans one step: sequence n owns packed rows cu_seqlens[n]:cu_seqlens[n+1], the first at position starts[n].

    Position t of sequence n lies in page page_tables[n][t // 64]. `works` names arguments of `MlaPlan.works` to
    prepare in the same copy. Raises ValueError when a page table does not reach its sequence's last row.
    """
    host = HostPlan.of(page_tables, cu_seqlens, starts, works, tiers)
    return host.there(one_copy(host.parts(), torch.device(device)))


def _places(facts: Tensor, tables: Tensor) -> Tensor:
    """int64 [R] of every packed row: page * 64 + row of the page."""
    counts = facts[:, 1]
    position = torch.repeat_interleave(facts[:, 2], counts) + _within(counts)
    table = torch.repeat_interleave(facts[:, 3], counts) + position // PAGE_TOKENS
    return tables[table].long() * PAGE_TOKENS + position % PAGE_TOKENS
