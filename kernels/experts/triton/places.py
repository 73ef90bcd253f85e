"""Rows sorted by expert, and which tile of which expert a program does, without the host ever waiting for the device.

All of it is counting in integers. Rows of an expert keep their order, so a sorted row's place follows from the choices
alone; no bit of a result depends on it anyway, since rows of a product do not meet.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.kernels.experts.configs import tiles_max

CHUNK: Final = 1024
"""Choices of a program: up to so many, one program does everything."""
STEP: Final = 16
"""Choices that are compared with all experts at once."""
WARPS: Final = 8
FIELDS: Final = 3
EXPERT, FIRST, END = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def choices(experts, first, last, expert, STEP: tl.constexpr):
    """int32 [STEP, E]: 1 where a choice from `first` on, before `last`, is that expert."""
    at = first + tl.arange(0, STEP)
    chosen = tl.load(experts + at, mask=at < last, other=-1).to(tl.int32)
    return (chosen[:, None] == expert[None, :]).to(tl.int32)


@triton.jit
def counted(experts, first, last, expert, STEP: tl.constexpr):
    """int32 [E]: how many of the choices from `first` to `last` are each expert."""
    counts = tl.zeros_like(expert)
    for at in range(first, last, STEP):
        counts += tl.sum(choices(experts, at, last, expert, STEP), axis=0)
    return counts


@triton.jit(do_not_specialize=["assigned"])
def count_kernel(
    experts, counts, assigned, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """counts [chunks, EXPERTS] of each chunk of choices."""
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    last = tl.minimum(chunk * CHUNK + CHUNK, assigned)
    tl.store(counts + chunk * EXPERTS + expert, counted(experts, chunk * CHUNK, last, expert, STEP))


@triton.jit(do_not_specialize=["assigned", "chunks"])
def place_kernel(
    experts, counts, order, tiles, used, assigned, chunks,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, STEP: tl.constexpr, ALONE: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """order[place] = choice for one chunk of choices, and its share of the map of tiles. ALONE: there is one chunk."""
    chunk = tl.program_id(0)
    expert = tl.arange(0, EXPERTS)
    before = tl.zeros_like(expert)
    if ALONE:
        counts_of = counted(experts, 0, assigned, expert, STEP)
    else:
        counts_of = tl.zeros_like(expert)
        for at in range(0, chunks, STEP):
            other = at + tl.arange(0, STEP)[:, None]
            theirs = tl.load(counts + other * EXPERTS + expert[None, :], mask=other < chunks, other=0)
            counts_of += tl.sum(theirs, axis=0)
            before += tl.sum(tl.where(other < chunk, theirs, 0), axis=0)
    first = tl.cumsum(counts_of, axis=0) - counts_of
    tiles_of = (counts_of + ROWS - 1) // ROWS
    tile = tl.cumsum(tiles_of, axis=0) - tiles_of
    if chunk == 0:
        tl.store(used, tl.sum(tiles_of, axis=0))
    for n in range(chunk, tl.max(tiles_of, axis=0), chunks):
        place = tiles + (tile + n) * FIELDS
        tl.store(place + EXPERT, expert, mask=n < tiles_of)
        tl.store(place + FIRST, first + n * ROWS, mask=n < tiles_of)
        tl.store(place + END, first + counts_of, mask=n < tiles_of)
    free = first + before
    last = tl.minimum(chunk * CHUNK + CHUNK, assigned)
    for at in range(chunk * CHUNK, last, STEP):
        mine = choices(experts, at, last, expert, STEP)
        place = tl.sum(mine * (free[None, :] + tl.cumsum(mine, axis=0) - 1), axis=1)
        choice = at + tl.arange(0, STEP)
        tl.store(order + place, choice, mask=choice < last)
        free += tl.sum(mine, axis=0)


@dataclass(frozen=True)
class Places:
    """order [R k] int32: choices (row times k plus place) sorted by expert; tiles [most, 3] int32: expert, first and
    end in `order` of each tile of `rows` rows, of which `used` [1] int32 exist."""

    order: Tensor
    tiles: Tensor
    used: Tensor
    rows: int


def sort_by_expert(experts: Tensor, count: int, rows: int) -> Places:
    """Places of the choices [R, k] int64 among `count` experts, contiguous, in tiles of `rows` rows; R k < 2^31."""
    assigned, device = experts.numel(), experts.device
    order = torch.empty(assigned, dtype=torch.int32, device=device)
    tiles = torch.empty((tiles_max(assigned, count, rows), FIELDS), dtype=torch.int32, device=device)
    used = torch.empty(1, dtype=torch.int32, device=device)
    chunks, width = triton.cdiv(assigned, CHUNK), triton.next_power_of_2(count)
    counts = order
    cut = {"EXPERTS": width, "CHUNK": CHUNK, "STEP": STEP, "num_warps": WARPS}
    if chunks > 1:
        counts = torch.empty((chunks, width), dtype=torch.int32, device=device)
        count_kernel[(chunks,)](experts, counts, assigned, **cut)
    place_kernel[(chunks,)](
        experts, counts, order, tiles, used, assigned, chunks, ROWS=rows, ALONE=chunks == 1, FIELDS=FIELDS, **cut
    )
    return Places(order, tiles, used, rows)
