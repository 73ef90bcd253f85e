"""Staging in Triton: copies as integers, so that a NaN keeps its payload, with 16-byte accesses.

| function | reads | writes |
| --- | --- | --- |
| gather | the pieces of a table at `places` | a uint8 buffer |
| scatter | the buffer | the pieces at `places` |
| move | the pieces at `sources` | the pieces at `targets` |
| split_planes | items, rows contiguous | uint8 [bytes of an item, items] |
| join_planes | the planes | items |

Each is one launch that reads every byte once and writes it once. Nothing is kept in the L2 for later: a slot is larger.
"""

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.kernels.staging.pieces import Table

GATHER: Final = tl.constexpr(0)
SCATTER: Final = tl.constexpr(1)
MOVE: Final = tl.constexpr(2)


@triton.jit
def place(places, which, first):
    """Entry `which` of places. The first entry came as a number, unless that is negative."""
    return tl.load(places + which, mask=(which > 0) | (first < 0), other=first)


@triton.jit(do_not_specialize=["source", "target", "rows"])
def copy_kernel(
    base, buffer, table, sources, targets, source, target, rows,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, MODE: tl.constexpr, EVICT: tl.constexpr,
):  # fmt: skip
    """One chunk a program (or every num_programs-th): UNIT items of base's dtype are a unit of the table."""
    for index in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = table + index * 5
        offset, step, which = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        packed, units = tl.load(row + 3), tl.load(row + 4)
        here = base + (offset + step * place(sources, which, source)) * UNIT
        if MODE == GATHER:
            origin, end = here, buffer + packed * UNIT
        elif MODE == SCATTER:
            origin, end = buffer + packed * UNIT, here
        else:
            origin, end = here, base + (offset + step * place(targets, which, target)) * UNIT
        items = units.to(tl.int32) * UNIT
        for first in tl.range(0, items, BLOCK):
            lane = first + tl.arange(0, BLOCK)
            inside = lane < items
            value = tl.load(origin + lane, mask=inside, eviction_policy=EVICT)
            tl.store(end + lane, value, mask=inside, eviction_policy=EVICT)


@triton.jit
def split_kernel(items, planes, count, row_stride, plane_stride, ITEM: tl.constexpr, BLOCK: tl.constexpr):
    """Items (integers of ITEM bytes) of one block of one row -> a byte of each plane."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = lane < count
    # No eviction hint: a thread's 16 items are four accesses to two sectors, and the L1 must keep those in between.
    value = tl.load(items + row * row_stride + lane, mask=inside)
    out = planes + row * count + lane
    for plane in tl.static_range(ITEM):
        byte = (value >> (8 * plane)).to(tl.uint8)
        tl.store(out + plane * plane_stride, byte, mask=inside, eviction_policy="evict_first")


@triton.jit
def join_kernel(items, planes, count, row_stride, plane_stride, ITEM: tl.constexpr, BLOCK: tl.constexpr):
    """The inverse of split_kernel."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    inside = lane < count
    source = planes + row * count + lane
    value = tl.zeros((BLOCK,), dtype=items.dtype.element_ty)
    for plane in tl.static_range(ITEM):
        byte = tl.load(source + plane * plane_stride, mask=inside)
        value |= byte.to(items.dtype.element_ty) << (8 * plane)
    tl.store(items + row * row_stride + lane, value, mask=inside, eviction_policy="evict_first")


@dataclass(frozen=True)
class CopyShape:
    """Of a copy: bytes of one step of a program, warps, and programs (None: one a chunk)."""

    block: int = 4 << 10
    warps: int = 4
    programs: int | None = None
    evict: str = "evict_first"


@dataclass(frozen=True)
class PlanesShape:
    """Of the planes' kernels: items of a program, warps."""

    block: int = 1024
    warps: int = 2


COPY: Final = CopyShape()
PLANES: Final = PlanesShape()
WORDS: Final = {16: torch.int32, 8: torch.int32, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def _copy(
    table: Table, mode: tl.constexpr, buffer: Tensor | None, sources: list[int] | Tensor,
    targets: list[int] | Tensor | None, shape: CopyShape,
) -> None:  # fmt: skip
    device = table.rows.device
    if buffer is not None:
        size = buffer.numel() * buffer.element_size()
        if buffer.device != device or not buffer.is_contiguous() or size < table.nbytes:
            raise ValueError(
                f"the buffer must be contiguous on {device}, with at least {table.nbytes} bytes, not {size}"
            )
        if buffer.data_ptr() % table.unit:
            raise ValueError(f"the buffer's address is no multiple of {table.unit} bytes")
    chunks = table.rows.shape[0]
    if chunks == 0:
        return
    word = WORDS[table.unit]
    base = _as_words(table.base, word)
    places, source = _places(sources, device)
    ends, target = (places, source) if targets is None else _places(targets, device)
    copy_kernel[(min(chunks, shape.programs or chunks),)](
        base,
        base if buffer is None else buffer.view(-1).view(torch.uint8)[: table.nbytes].view(word),
        table.rows,
        places,
        ends,
        source,
        target,
        chunks,
        UNIT=table.unit // word.itemsize,
        BLOCK=shape.block // word.itemsize,
        MODE=mode,
        EVICT=shape.evict,
        num_warps=shape.warps,
    )


def _places(places: list[int] | Tensor, device: torch.device) -> tuple[Tensor, int]:
    """Places on the device, and the first as a number where it is known: a slot alone costs no copy to the device."""
    if isinstance(places, Tensor):
        return places, -1
    if len(places) == 1:
        return _unused(device), places[0]
    return torch.tensor(places, dtype=torch.int64, device=device), places[0]


@cache
def _unused(device: torch.device) -> Tensor:
    return torch.zeros(2, dtype=torch.int64, device=device)


def _as_words(view: Tensor, word: torch.dtype) -> Tensor:
    """A tensor of `word` that begins where `view` does: only its address counts."""
    flat = view.as_strided((word.itemsize // view.element_size() or 1,), (1,))
    return flat.view(word)


def gather(table: Table, buffer: Tensor, places: list[int] | Tensor, shape: CopyShape = COPY) -> None:
    """Copies all pieces at `places` (one index for each `which`: a slot, pages) into the buffer.

    places may be an int64 tensor on the device. Raises ValueError for a buffer that doesn't fit; an index beyond a pool
    is the caller's bug, as it is in every kernel.
    """
    _copy(table, GATHER, buffer, places, None, shape)


def scatter(table: Table, buffer: Tensor, places: list[int] | Tensor, shape: CopyShape = COPY) -> None:
    """Copies the buffer to the pieces at `places`; what lies between and around them is left alone."""
    _copy(table, SCATTER, buffer, places, None, shape)


def move(table: Table, sources: list[int] | Tensor, targets: list[int] | Tensor, shape: CopyShape = COPY) -> None:
    """Copies the pieces at `sources` to the same pieces at `targets`: a fork's slot, a page.

    No place may be in both."""
    _copy(table, MOVE, None, sources, targets, shape)


INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _planes(items: Tensor, planes: Tensor, split: bool, shape: PlanesShape) -> None:
    """items [rows, n], rows contiguous; planes [bytes of an item, rows * n] uint8."""
    size = items.element_size()
    if items.ndim != 2 or (items.shape[1] > 1 and items.stride(1) != 1) or size not in INTEGERS:
        raise ValueError(f"items must be [rows, n] with contiguous rows, got {tuple(items.shape)} {items.dtype}")
    if planes.dtype != torch.uint8 or planes.shape != (size, items.numel()) or not planes.is_contiguous():
        raise ValueError(f"planes must be uint8 [{size}, {items.numel()}], got {tuple(planes.shape)} {planes.dtype}")
    rows, count = items.shape
    if rows * count == 0:
        return
    integers, stride = items.view(INTEGERS[size]), items.stride(0)
    grid = (triton.cdiv(count, shape.block), rows)
    kernel = split_kernel if split else join_kernel
    kernel[grid](integers, planes, count, stride, rows * count, ITEM=size, BLOCK=shape.block, num_warps=shape.warps)


def split_planes(items: Tensor, planes: Tensor | None = None, shape: PlanesShape = PLANES) -> Tensor:
    """Byte planes (naive.split_planes), uint8 [bytes of an item, rows * n], of items [rows, n] of 1, 2 or 4 bytes.

    A layer-major pool's slot is such items: S[:, slot].flatten(1), no copy in between.
    """
    if planes is None:
        planes = torch.empty((items.element_size(), items.numel()), dtype=torch.uint8, device=items.device)
    _planes(items, planes, True, shape)
    return planes


def join_planes(planes: Tensor, items: Tensor, shape: PlanesShape = PLANES) -> None:
    """The inverse, in place: writes items [rows, n] from their planes."""
    _planes(items, planes, False, shape)
