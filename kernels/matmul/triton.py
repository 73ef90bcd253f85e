"""x @ weight.T in Triton with bits that do not depend on the batch.

An element is one chain of products over K in ascending steps of a constant BLOCK_K: no atomics, no tuner. Rows of a
tile do not meet in an MMA, so the tile may follow the number of rows (configs.py). bf16 products of few outputs and a
long sum are cut in pieces, by the weight's shape alone (kernels/pieces); all others are one chain.

| argument | dtype | shape |
| --- | --- | --- |
| x | bf16 or fp32, rows contiguous | [M, K] |
| weight | that of x, rows contiguous | [N, K] |
| result | fp32, or `dtype` | [M, N] |

bf16 operands accumulate in fp32; fp32 operands multiply in full fp32 ("ieee", no tf32).
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from forkpoint.kernels.matmul.configs import (
    BLOCK_K,
    BLOCK_K_FP32,
    FP32,
    MULTIPROCESSORS,
    Tile,
    tile_for,
    without_tma,
)
from forkpoint.kernels.pieces.configs import WITHOUT_TMA, piece_tile_for, pieces_for
from forkpoint.kernels.pieces.triton import linear_in_pieces
from forkpoint.kernels.tiling.triton import step_product, store_tile, swizzled

TMA_ALIGNMENT: Final = 16
"""Bytes: a TMA descriptor's base and row stride are multiples of it."""
MIN_STAGES: Final = 3
ROWS_MAX: Final = 1 << 31
"""Row and column numbers are int32 (offsets are int64)."""


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, weight, out, rows, outputs, inputs, x_stride, weight_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    """One tile a program, operands by pointers."""
    m, n = swizzled(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N), GROUP)
    row = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    left = x + row.to(tl.int64)[:, None] * x_stride + step[None, :]
    right = weight + column.to(tl.int64)[:, None] * weight_stride + step[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, inputs, BLOCK_K * UNROLL):
        for part in tl.static_range(UNROLL):
            k = first + part * BLOCK_K
            if EVEN_K:
                a = tl.load(left + part * BLOCK_K, mask=row[:, None] < rows, other=0.0)
                b = tl.load(right + part * BLOCK_K, mask=column[:, None] < outputs, other=0.0)
            else:
                inside = step[None, :] < inputs - k
                a = tl.load(left + part * BLOCK_K, mask=(row[:, None] < rows) & inside, other=0.0)
                b = tl.load(right + part * BLOCK_K, mask=(column[:, None] < outputs) & inside, other=0.0)
            total = step_product(a, b, total, SWAPPED)
        left += BLOCK_K * UNROLL
        right += BLOCK_K * UNROLL
    store_tile(out, total, row, column, rows, outputs, out_stride, SWAPPED)


@triton.jit(do_not_specialize=["rows"])
def tma_kernel(
    x, weight, out, rows, outputs, inputs, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SWAPPED: tl.constexpr,
):  # fmt: skip
    """One tile a program; x and weight are TMA descriptors, which read 0 beyond their edges."""
    m, n = swizzled(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N), GROUP)
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, inputs, BLOCK_K):
        total = step_product(x.load([m * BLOCK_M, k]), weight.load([n * BLOCK_N, k]), total, SWAPPED)
    row = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    store_tile(out, total, row, column, rows, outputs, out_stride, SWAPPED)


@triton.jit
def chain(x, weight, row, column, inputs, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The products of one tile, all of K: fp32 [BLOCK_M, BLOCK_N]."""
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, inputs, BLOCK_K):
        total = step_product(x.load([row, k]), weight.load([column, k]), total, False)
    return total


@triton.jit(do_not_specialize=["rows", "whole"])
def persistent_kernel(
    x, weight, tail_weight, out, tail_out, rows, outputs, inputs, whole,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    TAIL: tl.constexpr,
):  # fmt: skip
    """PROGRAMS programs walk over the first `whole` tiles, then over the rest in TAIL column parts each.

    All five tensors are TMA descriptors: [BLOCK_M or BLOCK_N, BLOCK_K] for loads, half a tile and a part for stores.
    """
    row_tiles = tl.cdiv(rows, BLOCK_M)
    column_tiles = tl.cdiv(outputs, BLOCK_N)
    HALF: tl.constexpr = BLOCK_N // 2
    for index in tl.range(tl.program_id(0), whole, PROGRAMS, flatten=True):
        m, n = swizzled(index, row_tiles, column_tiles, GROUP)
        total = chain(x, weight, m * BLOCK_M, n * BLOCK_N, inputs, BLOCK_M, BLOCK_N, BLOCK_K)
        # In halves: a whole tile on its way to memory does not fit shared memory beside the pipeline.
        left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        out.store([m * BLOCK_M, n * BLOCK_N], left.to(out.dtype))
        out.store([m * BLOCK_M, n * BLOCK_N + HALF], right.to(out.dtype))
    if TAIL > 1:
        PART: tl.constexpr = BLOCK_N // TAIL
        for part in tl.range(tl.program_id(0), (row_tiles * column_tiles - whole) * TAIL, PROGRAMS):
            m, n = swizzled(whole + part // TAIL, row_tiles, column_tiles, GROUP)
            column = n * BLOCK_N + part % TAIL * PART
            total = chain(x, tail_weight, m * BLOCK_M, column, inputs, BLOCK_M, PART, BLOCK_K)
            tail_out.store([m * BLOCK_M, column], total.to(tail_out.dtype))


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """Why `linear` does not take a call, or None."""
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        return f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are not [M, K] and [N, K]"
    if x.dtype != weight.dtype or x.dtype not in (torch.bfloat16, torch.float32):
        return f"x is {x.dtype}, weight {weight.dtype}: both must be bf16, or both fp32"
    if 1 not in (x.stride(1), x.shape[1]) or 1 not in (weight.stride(1), weight.shape[1]):
        return "the values of a row are not contiguous"
    if max(*x.shape, *weight.shape) >= ROWS_MAX:
        return f"a dimension of {max(*x.shape, *weight.shape)} does not fit int32"
    return None


def why_not_tma(*tensors: Tensor) -> str | None:
    """Why descriptors cannot describe these operands, the result among them, or None."""
    for tensor in tensors:
        if tensor.dtype != torch.bfloat16 and tensor is not tensors[-1]:
            return "products of descriptors are of bf16 only"
        if 0 in tensor.shape:
            return "a descriptor cannot be empty"
        if tensor.data_ptr() % TMA_ALIGNMENT or tensor.stride(0) * tensor.element_size() % TMA_ALIGNMENT:
            return f"{tuple(tensor.shape)}: base and row stride must be multiples of {TMA_ALIGNMENT} bytes for TMA"
    return None


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32, tile: Tile | None = None) -> Tensor:
    """x @ weight.T: x [M, K], weight [N, K] -> [M, N]. `tile` overrides the pinned one, for tests and tuning: one
    chain then, whatever the shape.

    Raises ValueError with `why_not`'s reason, or for a `tile` with descriptors where they cannot be made.
    """
    if reason := why_not(x, weight):
        raise ValueError(reason)
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    pieces = pieces_for(inputs, outputs) if x.dtype == torch.bfloat16 and tile is None else 1
    if pieces > 1:
        tma = why_not_tma(x, weight) is None
        linear_in_pieces(x, weight, out, pieces, piece_tile_for(rows, outputs, pieces) if tma else WITHOUT_TMA)
        return out
    chosen = tile or (FP32 if x.dtype == torch.float32 else tile_for(rows, outputs))
    if chosen.persistent or chosen.tma:
        reason = why_not_tma(x, weight, out)
        if reason is None:
            (_launch_persistent if chosen.persistent else _launch_tma)(x, weight, out, chosen)
            return out
        if tile is not None:
            raise ValueError(reason)
        chosen = without_tma(chosen)
    block_k = BLOCK_K_FP32 if x.dtype == torch.float32 else BLOCK_K
    linear_kernel[(_tiles(chosen, rows, outputs),)](
        x, weight, out, rows, outputs, inputs, x.stride(0), weight.stride(0), out.stride(0),
        BLOCK_M=chosen.rows, BLOCK_N=chosen.columns, BLOCK_K=block_k, GROUP=chosen.group,
        EVEN_K=inputs % (block_k * chosen.unroll) == 0, SWAPPED=chosen.swapped, UNROLL=chosen.unroll,
        num_warps=chosen.warps, num_stages=chosen.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _tiles(tile: Tile, rows: int, outputs: int) -> int:
    return triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns)  # type: ignore[no-any-return]


def _launch_tma(x: Tensor, weight: Tensor, out: Tensor, tile: Tile) -> None:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    tma_kernel[(_tiles(tile, rows, outputs),)](
        TensorDescriptor.from_tensor(x, [tile.rows, BLOCK_K]),
        TensorDescriptor.from_tensor(weight, [tile.columns, BLOCK_K]),
        out, rows, outputs, inputs, out.stride(0),
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=BLOCK_K, GROUP=tile.group, SWAPPED=tile.swapped,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip


def _launch_persistent(x: Tensor, weight: Tensor, out: Tensor, tile: Tile) -> None:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    tiles, part = _tiles(tile, rows, outputs), tile.columns // tile.tail
    programs = min(tiles * tile.tail, MULTIPROCESSORS * tile.occupancy)
    weights = TensorDescriptor.from_tensor(weight, [tile.columns, BLOCK_K])
    halves = TensorDescriptor.from_tensor(out, [tile.rows, tile.columns // 2])
    persistent_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [tile.rows, BLOCK_K]), weights,
        weights if tile.tail == 1 else TensorDescriptor.from_tensor(weight, [part, BLOCK_K]), halves,
        halves if tile.tail == 1 else TensorDescriptor.from_tensor(out, [tile.rows, part]),
        rows, outputs, inputs, tiles if tile.tail == 1 else tiles // MULTIPROCESSORS * MULTIPROCESSORS,
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=BLOCK_K, GROUP=tile.group, PROGRAMS=programs, TAIL=tile.tail,
        num_warps=tile.warps, enable_fp_fusion=False,
        # fp32 halves leave room for one stage less.
        num_stages=tile.stages - (tile.stages > MIN_STAGES and out.dtype == torch.float32),
    )  # fmt: skip
