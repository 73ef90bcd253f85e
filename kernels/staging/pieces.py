"""What to copy: a table of runs of bytes, made once for a set of pools and used for every slot.

A part of a checkpoint lies in a pool as one view, or several (the conv tail of a head group: its channels of q, k and
v). A view is cut into the runs that are contiguous in memory, runs into chunks; each chunk is a row of the table. Parts
lie in the buffer one after another, each at a multiple of 16 bytes, with exactly the bytes that a store expects.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

UNIT_BYTES: Final = 16
"""The widest access of a thread, and the alignment of parts in the buffer."""
CHUNK_BYTES: Final = 4 << 10
"""Bytes that one program copies at most. Its row of the table adds 1 % to them; larger chunks were slower (H200)."""
BYTES: Final = [0, 1, 3, 4]
"""Columns of a table that count bytes, until they are divided by the unit."""


@dataclass(frozen=True)
class Piece:
    """A view of a pool at place 0, whose other places lie `step` bytes apart, and which entry of `places` it obeys.

    A slot's piece of the pool S [layers, slots, H, V, K] is S[layer, 0], with step = bytes of a slot.
    """

    view: Tensor
    step: int
    which: int = 0


@dataclass(frozen=True)
class Table:
    """Chunks of all pieces, for the kernel and for its twin."""

    rows: Tensor
    """[chunks, 5] int64 on the pools' device: offset from `base`, step, which place, offset in the buffer, length; all
    but the third in units."""
    base: Tensor
    """The first piece's view, which offsets are counted from."""
    unit: int
    """Bytes of a unit: 16, or less where a pool's shape leaves no choice."""
    nbytes: int
    """Size of the buffer."""
    offsets: tuple[int, ...]
    """Where each part begins in the buffer, in bytes."""
    parts: tuple[tuple[Piece, ...], ...]
    """What the table was built of, for its twin; and so that the pools outlive it."""


def build_table(parts: Sequence[Sequence[Piece]], chunk_bytes: int = CHUNK_BYTES) -> Table:
    """The table of parts, each a row-major tensor whose last axis is split over its pieces.

    Raises ValueError for no piece at all, for pools on several devices, and for pieces of a part that don't agree.
    """
    views = tuple(piece.view for pieces in parts for piece in pieces)
    if not views:
        raise ValueError("a table needs at least one piece")
    base = views[0]
    if {view.device for view in views} != {base.device}:
        raise ValueError("pieces lie on several devices")
    found, offsets, end = [], [], 0
    for pieces in parts:
        offsets.append(end)
        part, size = _part_rows(pieces, base.data_ptr(), end)
        found.append(part)
        end += -(-size // UNIT_BYTES) * UNIT_BYTES
    rows = torch.cat(found)
    unit = UNIT_BYTES
    while base.data_ptr() % unit or (rows[:, BYTES] % unit).any():
        unit //= 2
    rows = _cut(rows, max(chunk_bytes // unit * unit, unit))
    rows[:, BYTES] //= unit
    return Table(rows.to(base.device), base, unit, end, tuple(offsets), tuple(map(tuple, parts)))


def _part_rows(pieces: Sequence[Piece], base: int, start: int) -> tuple[Tensor, int]:
    """Rows of a part's runs in bytes, and the part's size: line by line, the pieces' lines side by side."""
    lines = {math.prod(piece.view.shape[:-1]) for piece in pieces}
    if len(lines) != 1:
        raise ValueError(f"pieces of one part have {sorted(lines)} lines")
    widths = [piece.view.shape[-1] * piece.view.element_size() for piece in pieces]
    found, before = [], 0
    for piece, width in zip(pieces, widths, strict=True):
        runs, length = _runs(piece.view)
        stride = length
        if len(pieces) > 1 and width:
            # Each line goes to a place of its own, also where lines of the piece follow one another.
            runs = (runs[:, None] + torch.arange(0, length, width)).flatten()
            length, stride = width, sum(widths)
        rows = torch.empty((len(runs), 5), dtype=torch.int64)
        rows[:, 0] = piece.view.data_ptr() - base + runs
        rows[:, 1], rows[:, 2], rows[:, 4] = piece.step, piece.which, length
        rows[:, 3] = start + before + torch.arange(len(runs)) * stride
        found.append(rows)
        before += width
    return torch.cat(found), lines.pop() * sum(widths)


def _runs(view: Tensor) -> tuple[Tensor, int]:
    """Byte offsets of a view's contiguous runs, in row-major order, and the bytes of each."""
    if view.numel() == 0:
        return torch.empty(0, dtype=torch.int64), 0
    item, run, axis = view.element_size(), 1, view.ndim
    while axis and (view.shape[axis - 1] == 1 or view.stride(axis - 1) == run):
        axis -= 1
        run *= view.shape[axis]
    offsets = torch.zeros(1, dtype=torch.int64)
    for extent, stride in zip(view.shape[:axis], view.stride()[:axis], strict=True):
        offsets = (offsets[:, None] + torch.arange(extent) * (stride * item)).flatten()
    return offsets, run * item


def _cut(rows: Tensor, chunk: int) -> Tensor:
    """Rows of at most `chunk` bytes each, in the same order."""
    counts = -(-rows[:, 4] // chunk)
    cut = torch.repeat_interleave(rows, counts, dim=0)
    first = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    done = (torch.arange(len(cut)) - first) * chunk
    cut[:, 0] += done
    cut[:, 3] += done
    cut[:, 4] = (cut[:, 4] - done).clamp(max=chunk)
    return cut
