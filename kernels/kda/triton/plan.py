"""Where the rows of a packed batch lie, as int32 tensors for the kernels: made once a batch, for all layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from forkpoint.limits import TILE_TOKENS

NULL_SLOT = -1
"""Slot of a sequence that must touch nothing, as padding of a captured decode step needs: its o is zeros."""


@dataclass(frozen=True)
class PrefillPlan:
    """Sequences of any length, each with its slot; see prepare.py and recur.py for the columns."""

    tiles: Tensor
    """[tiles, 2] int32: sequence, checkpoint row or -1."""
    sequences: Tensor
    """[N, 5] int32: slot, first row, start, end, first tile."""
    has_checkpoints: bool


def _check(slots: list[int], lengths: list[int], starts: list[int]) -> None:
    if len(slots) != len(lengths) or len(starts) != len(lengths):
        raise ValueError(f"{len(lengths)} sequences, {len(slots)} slots, {len(starts)} starts")
    live = [slot for slot in slots if slot != NULL_SLOT]
    if len(set(live)) != len(live):
        raise ValueError(f"two sequences share a slot: {slots}")
    if min((*live, *starts, *lengths), default=0) < 0:
        raise ValueError("slots, starts and lengths must not be negative")


def prefill_plan(
    slots: list[int],
    cu_seqlens: list[int],
    starts: list[int],
    device: torch.device,
    checkpoints: dict[tuple[int, int], int] | None = None,
) -> PrefillPlan:
    """Sequence n owns rows cu_seqlens[n]:cu_seqlens[n+1], starts at position starts[n] and lives in slots[n].

    checkpoints: (sequence, grid position) -> row of the checkpoint pool that takes S there. Raises ValueError for a bad
    batch and for a checkpoint that no tile of the batch reaches.
    """
    lengths = [last - first for first, last in pairwise(cu_seqlens)]
    _check(slots, lengths, starts)
    left = dict(checkpoints or {})
    tiles: list[tuple[int, int]] = []
    sequences: list[tuple[int, int, int, int, int]] = []
    for n, (slot, length, start) in enumerate(zip(slots, lengths, starts, strict=True)):
        end = start + length
        sequences.append((slot, cu_seqlens[n], start, end, len(tiles)))
        if slot == NULL_SLOT or length == 0:
            continue
        for tile in range(start // TILE_TOKENS, -(-end // TILE_TOKENS)):
            closing = (tile + 1) * TILE_TOKENS
            tiles.append((n, left.pop((n, closing), -1) if closing <= end else -1))
    if left:
        raise ValueError(f"no tile of the batch ends at {sorted(left)} (sequence, position)")
    return PrefillPlan(
        tiles=_table(tiles, 2, device),
        sequences=_table(sequences, 5, device),
        has_checkpoints=bool(checkpoints),
    )


def decode_facts(slots: list[int], positions: list[int], device: torch.device) -> Tensor:
    """[N, 2] int32 for one new row in each slot (NULL_SLOT: none): slot, position."""
    _check(slots, [1] * len(slots), positions)
    return _table(list(zip(slots, positions, strict=True)), 2, device)


def _table(values: Sequence[tuple[int, ...]], columns: int, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device).view(-1, columns)
