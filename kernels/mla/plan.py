"""MlaPlan: where the rows of a packed batch lie, and which programs attend to them, once a step for all layers.

Made from the scheduler's lists on the host, and copied to the device in one piece.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from forkpoint.kernels.mla.work import TIERS, Works, paired, within, works_of
from forkpoint.kernels.tables import one_copy
from forkpoint.limits import PAGE_TOKENS


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
            hosted, largest = works_of(self.facts, self.tiers, *key)
            self._works[key] = Works(paired(one_copy(hosted, self.device)), largest)
        return self._works[key]


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
        made = {key: works_of(facts, tiers, *key) for key in works}
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
            made._works[key] = Works(paired(rest[: len(hosted)]), largest)
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
    position = torch.repeat_interleave(facts[:, 2], counts) + within(counts)
    table = torch.repeat_interleave(facts[:, 3], counts) + position // PAGE_TOKENS
    return tables[table].long() * PAGE_TOKENS + position % PAGE_TOKENS
