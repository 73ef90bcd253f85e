"""Which programs attend to a packed batch: blocks of (token, head) rows, times splits of keys.

A block's rows are those of one sequence, tokens outside, heads inside, so any number of heads fills it. Which rows
share a block, and how many splits the block walks, changes no bit of a row (kernels/mla/triton.py says why).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from forkpoint.limits import PAGE_TOKENS, SPLIT_TOKENS


@dataclass(frozen=True)
class Work:
    """One launch of the split kernel and of the combine kernel."""

    items: Tensor
    """int32 [W, 3]: sequence, block of it, split; a block's splits one after another, ascending."""
    blocks: Tensor
    """int32 [B, 4]: sequence, block of it, first item, number of splits."""


@dataclass(frozen=True)
class Plan:
    """A batch, cut into launches that fit the workspace."""

    sequences: Tensor
    """int64 [N, 4]: first packed row, rows, position of the first, offset of its page table."""
    tables: Tensor
    """int32: all page tables, end to end, each up to the page of its sequence's last row."""
    launches: tuple[Work, ...]
    items_max: int


@dataclass(frozen=True)
class _Blocks:
    """All blocks of a batch, [B] each: sequence, number in it, splits up to its last row."""

    sequence: Tensor
    number: Tensor
    splits: Tensor

    @staticmethod
    def of(rows: Tensor, starts: Tensor, heads: int, block_rows: int) -> "_Blocks":
        places = rows * heads
        counts = (places + block_rows - 1) // block_rows
        sequence = torch.repeat_interleave(torch.arange(len(rows)), counts)
        number = _within(counts)
        last = torch.minimum((number + 1) * block_rows, places[sequence]) - 1
        return _Blocks(sequence, number, (starts[sequence] + last // heads) // SPLIT_TOKENS + 1)

    def launches(self, items_max: int) -> Iterator["_Blocks"]:
        """Runs of blocks of at most `items_max` items, or of one block."""
        ends = self.splits.cumsum(0)
        first, before = 0, 0
        while first < len(ends):
            end = int(torch.searchsorted(ends, before + items_max, right=True))
            end = max(end, first + 1)
            yield _Blocks(self.sequence[first:end], self.number[first:end], self.splits[first:end])
            first, before = end, int(ends[end - 1])

    def work(self, device: torch.device) -> Work:
        """Tables of one launch."""
        items = torch.stack(
            [
                torch.repeat_interleave(self.sequence, self.splits),
                torch.repeat_interleave(self.number, self.splits),
                _within(self.splits),
            ],
            dim=1,
        )
        first = self.splits.cumsum(0) - self.splits
        blocks = torch.stack([self.sequence, self.number, first, self.splits], dim=1)
        return Work(items=items.to(device, torch.int32), blocks=blocks.to(device, torch.int32))


def _within(counts: Tensor) -> Tensor:
    """0, 1, ..., counts[0] - 1, 0, 1, ..., counts[1] - 1, ..."""
    ends = counts.cumsum(0)
    return torch.arange(int(counts.sum())) - torch.repeat_interleave(ends - counts, counts)


@lru_cache(maxsize=8)
def plan(
    tables: tuple[tuple[int, ...], ...],
    cu_seqlens: tuple[int, ...],
    starts: tuple[int, ...],
    heads: int,
    block_rows: int,
    items_max: int,
    device: torch.device,
) -> Plan:
    """Plans one batch in launches of at most `items_max` items (one block may have more).

    Raises ValueError when a page table does not reach a sequence's last row.
    """
    sequences: list[tuple[int, int, int, int]] = []
    flat: list[int] = []
    for table, (first, last), start in zip(tables, pairwise(cu_seqlens), starts, strict=True):
        tokens = start + last - first
        pages = -(-tokens // PAGE_TOKENS) if last > first else 0
        if len(table) < pages:
            raise ValueError(f"a sequence of {tokens} tokens needs {pages} pages, its table has {len(table)}")
        sequences.append((first, last - first, start, len(flat)))
        flat += table[:pages]
    facts = torch.tensor(sequences, dtype=torch.int64).view(-1, 4)
    blocks = _Blocks.of(facts[:, 1], facts[:, 2], heads, block_rows)
    works = tuple(run.work(device) for run in blocks.launches(items_max))
    return Plan(
        sequences=facts.to(device),
        tables=torch.tensor(flat, dtype=torch.int32).to(device),
        launches=works,
        items_max=max((work.items.shape[0] for work in works), default=0),
    )
