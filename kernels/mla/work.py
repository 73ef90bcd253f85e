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
class _Block:
    sequence: int
    number: int
    splits: int


def _blocks(cu_seqlens: tuple[int, ...], starts: tuple[int, ...], heads: int, rows: int) -> Iterator[_Block]:
    for sequence, ((first, last), start) in enumerate(zip(pairwise(cu_seqlens), starts, strict=True)):
        places = (last - first) * heads
        for number in range(-(-places // rows)):
            position = start + (min((number + 1) * rows, places) - 1) // heads
            yield _Block(sequence, number, position // SPLIT_TOKENS + 1)


def _work(blocks: list[_Block], device: torch.device) -> Work:
    items = [(b.sequence, b.number, split) for b in blocks for split in range(b.splits)]
    rows: list[tuple[int, int, int, int]] = []
    first = 0
    for b in blocks:
        rows.append((b.sequence, b.number, first, b.splits))
        first += b.splits
    return Work(
        items=torch.tensor(items, dtype=torch.int32, device=device),
        blocks=torch.tensor(rows, dtype=torch.int32, device=device),
    )


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
        pages = -(-(start + last - first) // PAGE_TOKENS) if last > first else 0
        if len(table) < pages:
            raise ValueError(
                f"a sequence of {start + last - first} tokens needs {pages} pages, its table has {len(table)}"
            )
        sequences.append((first, last - first, start, len(flat)))
        flat += table[:pages]
    launches: list[list[_Block]] = []
    filled = items_max
    for block in _blocks(cu_seqlens, starts, heads, block_rows):
        if filled + block.splits > items_max:
            launches.append([])
            filled = 0
        launches[-1].append(block)
        filled += block.splits
    works = tuple(_work(blocks, device) for blocks in launches)
    return Plan(
        sequences=torch.tensor(sequences, dtype=torch.int64, device=device),
        tables=torch.tensor(flat, dtype=torch.int32, device=device),
        launches=works,
        items_max=max((work.items.shape[0] for work in works), default=0),
    )
