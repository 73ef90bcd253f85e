"""How query rows are laid into blocks of 16 for attention, and which blocks take which loop order."""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.matmul.naive import BLOCK_ROWS
from forkpoint.limits import PAGE_TOKENS, SPLIT_TOKENS

SPLIT_PAGES: Final = SPLIT_TOKENS // PAGE_TOKENS
SHARED_BLOCKS: Final = 4
"""From this many blocks a sequence takes the shared loop order; both orders give the same bits."""
RAGGED_PAGES: Final = 512
"""Pages that the ragged order gathers at once; a sequence with more takes the shared order."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of one sequence: `count` of them from block `first`, over its first `pages` pages."""

    first: int
    count: int
    table: tuple[int, ...]
    """Ids of the sequence's pages, up to the page of its last row."""
    end: int
    """Positions that have a key."""

    @property
    def pages(self) -> int:
        return len(self.table)


@dataclass(frozen=True)
class BlockPlan:
    """Query rows of a packed batch in blocks [B, 16, D]: a row's place in its block never varies."""

    blocks: int
    rows: Tensor
    """[R * Hq] row, counted over all blocks, of each token and head."""
    positions: Tensor
    """[B, 16] position of each row's token (int64); rows without a token get that of their neighbour."""
    shared: tuple[Blocks, ...]
    ragged: tuple[Blocks, ...]


def _positions(start: int, groups: int, heads: int, device: torch.device) -> Tensor:
    """[groups * blocks a token, 16] positions of the rows of blocks that begin at token `start`."""
    tokens, per_token = max(1, BLOCK_ROWS // heads), -(-heads // BLOCK_ROWS)
    row_token = torch.arange(BLOCK_ROWS, device=device).div(heads, rounding_mode="floor").clamp(max=tokens - 1)
    first = torch.arange(groups, device=device).repeat_interleave(per_token) * tokens + start
    return first[:, None] + row_token


@lru_cache(maxsize=8)
def block_plan(
    tables: tuple[tuple[int, ...], ...],
    cu_seqlens: tuple[int, ...],
    starts: tuple[int, ...],
    heads: int,
    device: torch.device,
) -> BlockPlan:
    """Plans one batch; raises ValueError when a page table does not reach a sequence's last row."""
    tokens, per_token = max(1, BLOCK_ROWS // heads), -(-heads // BLOCK_ROWS)
    head = torch.arange(heads, device=device)
    rows: list[Tensor] = []
    positions: list[Tensor] = []
    shared: list[Blocks] = []
    ragged: list[Blocks] = []
    total = 0
    for table, (first_row, last_row), start in zip(tables, pairwise(cu_seqlens), starts, strict=True):
        if first_row == last_row:
            continue
        end = start + last_row - first_row
        pages = -(-end // PAGE_TOKENS)
        if len(table) < pages:
            raise ValueError(f"a sequence of {end} tokens needs {pages} pages, its table has {len(table)}")
        group = start // tokens
        groups = (end - 1) // tokens - group + 1
        token = torch.arange(start, end, device=device)
        place = (token // tokens - group) * (per_token * BLOCK_ROWS) + token % tokens * heads
        rows.append((total * BLOCK_ROWS + place[:, None] + head).flatten())
        positions.append(_positions(group * tokens, groups, heads, device))
        item = Blocks(total, groups * per_token, table[:pages], end)
        few = item.count < SHARED_BLOCKS and item.count * pages <= RAGGED_PAGES
        (ragged if few else shared).append(item)
        total += item.count
    empty = torch.empty(0, dtype=torch.int64, device=device)
    return BlockPlan(
        blocks=total,
        rows=torch.cat([empty, *rows]),
        positions=torch.cat([empty.view(0, BLOCK_ROWS), *positions]),
        shared=tuple(shared),
        ragged=tuple(ragged),
    )
