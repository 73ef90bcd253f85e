"""Where the rows of a packed batch lie in the tiles that it touches.

Tiles are laid out step by step: first the first tile of every sequence, then the second of every sequence that has
one, and so on, sequences with more tiles first. So each step of the serial pass works on one contiguous slice, and
on a prefix of the states.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from forkpoint.limits import TILE_TOKENS


@dataclass(frozen=True)
class Step:
    """One step of the serial pass: tiles first:last belong to the first last - first sequences of the plan."""

    first: int
    last: int
    closing: int
    """How many of those sequences, counted from the first, close their tile in this step."""


@dataclass(frozen=True)
class TilePlan:
    """Index tensors (int64) for one batch and head count H; "head row" = (tile * H + head) * 16 + row in the tile."""

    tiles: int
    steps: tuple[Step, ...]
    new_head_rows: Tensor
    """[R * H] head row of each new row and head."""
    open_slots: Tensor
    """[Q] slot of each row that the slots' open tiles contribute."""
    open_places: Tensor
    """[Q] its place in the open tile."""
    open_head_rows: Tensor
    """[Q * H] its head rows."""
    keep_rows: Tensor
    """[W] new rows whose tile stays open."""
    keep_slots: Tensor
    """[W] slot each goes to."""
    keep_places: Tensor
    """[W] place in the slot's open tile."""
    state_slots: Tensor
    """[N'] slot of each sequence with a new row, most tiles first."""
    closing_slots: Tensor
    """[N''] slots whose S moves on: a prefix of state_slots."""


@dataclass(frozen=True)
class _Sequence:
    slot: int
    first_row: int
    start: int
    end: int

    @property
    def origin(self) -> int:
        """First position of the first tile touched."""
        return self.start // TILE_TOKENS * TILE_TOKENS

    @property
    def tiles(self) -> int:
        return -(-self.end // TILE_TOKENS) - self.origin // TILE_TOKENS

    @property
    def closing(self) -> int:
        return self.end // TILE_TOKENS - self.origin // TILE_TOKENS


def _steps(sequences: list[_Sequence]) -> tuple[Step, ...]:
    steps: list[Step] = []
    first = 0
    for step in range(max((s.tiles for s in sequences), default=0)):
        active = sum(s.tiles > step for s in sequences)
        steps.append(Step(first, first + active, sum(s.closing > step for s in sequences)))
        first += active
    return tuple(steps)


@lru_cache(maxsize=8)
def tile_plan(
    slots: tuple[int, ...], cu_seqlens: tuple[int, ...], starts: tuple[int, ...], heads: int, device: torch.device
) -> TilePlan:
    """Plans one batch, once for all layers; zero-length sequences take no part. Raises ValueError for a bad batch."""
    bounds = list(pairwise(cu_seqlens))
    if len(slots) != len(bounds) or len(starts) != len(bounds):
        raise ValueError(f"{len(bounds)} sequences, {len(slots)} slots, {len(starts)} starts")
    if len(set(slots)) != len(slots):
        raise ValueError(f"two sequences share a slot: {list(slots)}")
    sequences = [
        _Sequence(slot, first, start, start + last - first)
        for slot, (first, last), start in zip(slots, bounds, starts, strict=True)
        if last > first
    ]
    sequences.sort(key=lambda s: (s.tiles, s.closing), reverse=True)
    steps = _steps(sequences)
    new: list[int] = [0] * cu_seqlens[-1]
    opened: list[tuple[int, int, int]] = []
    keep: list[tuple[int, int, int]] = []
    for n, s in enumerate(sequences):
        for position in range(s.origin, s.end):
            step, place = divmod(position - s.origin, TILE_TOKENS)
            tile_row = (steps[step].first + n) * TILE_TOKENS + place
            if position < s.start:
                opened.append((s.slot, place, tile_row))
                continue
            row = s.first_row + position - s.start
            new[row] = tile_row
            if position >= s.end // TILE_TOKENS * TILE_TOKENS:
                keep.append((row, s.slot, place))

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def head_rows(tile_rows: Tensor) -> Tensor:
        tile, place = tile_rows // TILE_TOKENS, tile_rows % TILE_TOKENS
        head = torch.arange(heads, device=device)
        return ((tile[:, None] * heads + head) * TILE_TOKENS + place[:, None]).flatten()

    return TilePlan(
        tiles=steps[-1].last if steps else 0,
        steps=steps,
        new_head_rows=head_rows(index(new)),
        open_slots=index([o[0] for o in opened]),
        open_places=index([o[1] for o in opened]),
        open_head_rows=head_rows(index([o[2] for o in opened])),
        keep_rows=index([k[0] for k in keep]),
        keep_slots=index([k[1] for k in keep]),
        keep_places=index([k[2] for k in keep]),
        state_slots=index([s.slot for s in sequences]),
        closing_slots=index([s.slot for s in sequences if s.closing > 0]),
    )
