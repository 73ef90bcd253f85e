"""x @ weight.T whose sum over K is cut in pieces, in Triton, with bits that do not depend on the batch.

A piece is one chain of products in ascending steps of BLOCK_K, from zero; an element is the fp32 sum of its pieces, in
ascending order. Where the rows are few, each program does one piece and `fold_kernel` adds them: a machine's worth of
programs then loads the weights. Where they are many, a program goes through all pieces of its tile. The bits are the
same: who does a piece is no part of them, how many there are is (configs.py).

| argument | dtype | shape |
| --- | --- | --- |
| x | bf16, rows contiguous | [M, K] |
| weight | bf16, rows contiguous | [N, K] |
| out | bf16 or fp32, contiguous | [M, N] |
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from forkpoint.kernels.matmul.configs import BLOCK_K
from forkpoint.kernels.pieces.configs import PieceTile
from forkpoint.kernels.tiling.triton import step_product, store_tile, swizzled

GROUP: Final = 8
"""Row tiles that are walked before the next column."""
FOLD_BLOCK: Final = 512
"""Elements of a program of `fold_kernel`."""


@triton.jit(do_not_specialize=["rows"])
def split_kernel(
    x, weight, partial, rows, outputs, inputs, PIECE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, SWAPPED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, pieces): one piece of one tile to partial [pieces, M, N], fp32. x and weight are TMA descriptors."""
    if EARLY:
        gdc_launch_dependents()
    piece = tl.program_id(1)
    m, n = swizzled(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N), GROUP)
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(piece * PIECE, tl.minimum(piece * PIECE + PIECE, inputs), BLOCK_K):
        total = step_product(x.load([m * BLOCK_M, k]), weight.load([n * BLOCK_N, k]), total, SWAPPED)
    row = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    store_tile(partial + piece.to(tl.int64) * rows * outputs, total, row, column, rows, outputs, outputs, SWAPPED)


@triton.jit(do_not_specialize=["count"])
def fold_kernel(partial, out, count, PIECES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Adds the pieces of `count` elements, in ascending order."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    if EARLY:
        gdc_wait()
    total = tl.load(partial + place, mask=inside, other=0.0)
    for piece in tl.static_range(1, PIECES):
        total += tl.load(partial + piece * count.to(tl.int64) + place, mask=inside, other=0.0)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def whole_kernel(
    x, weight, extra, out, rows, outputs, inputs, PIECE: tl.constexpr, PIECES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, EXTRA: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """All pieces of one tile of BLOCK_N + EXTRA columns. x, weight and extra are TMA descriptors."""
    m, n = swizzled(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N + EXTRA), GROUP)
    row, first = m * BLOCK_M, n * (BLOCK_N + EXTRA)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    rest = tl.zeros((BLOCK_M, EXTRA if EXTRA else 16), dtype=tl.float32)
    for piece in range(PIECES):
        part, side = tl.zeros_like(total), tl.zeros_like(rest)
        for k in range(piece * PIECE, tl.minimum(piece * PIECE + PIECE, inputs), BLOCK_K):
            a = x.load([row, k])
            part = step_product(a, weight.load([first, k]), part, False)
            if EXTRA:
                side = step_product(a, extra.load([first + BLOCK_N, k]), side, False)
        total += part
        rest += side
    rows_of = row + tl.arange(0, BLOCK_M)
    store_tile(out, total, rows_of, first + tl.arange(0, BLOCK_N), rows, outputs, outputs, False)
    if EXTRA:
        store_tile(out, rest, rows_of, first + BLOCK_N + tl.arange(0, EXTRA), rows, outputs, outputs, False)


@triton.jit(do_not_specialize=["rows"])
def pointer_kernel(
    x, weight, out, rows, outputs, inputs, x_stride, weight_stride, PIECE: tl.constexpr, PIECES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """All pieces of one tile, operands by pointers."""
    m, n = swizzled(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N), GROUP)
    row = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    left = x + row.to(tl.int64)[:, None] * x_stride
    right = weight + column.to(tl.int64)[:, None] * weight_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for piece in range(PIECES):
        part = tl.zeros_like(total)
        for k in range(piece * PIECE, tl.minimum(piece * PIECE + PIECE, inputs), BLOCK_K):
            inside = k + step[None, :] < inputs
            a = tl.load(left + k + step[None, :], mask=(row[:, None] < rows) & inside, other=0.0)
            b = tl.load(right + k + step[None, :], mask=(column[:, None] < outputs) & inside, other=0.0)
            part = step_product(a, b, part, False)
        total += part
    store_tile(out, total, row, column, rows, outputs, outputs, False)


def linear_in_pieces(x: Tensor, weight: Tensor, out: Tensor, pieces: int, tile: PieceTile) -> None:
    """Writes x @ weight.T into `out`. The operands suit the tile: TMA takes them, or it has none."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    cut = {"PIECE": triton.cdiv(triton.cdiv(inputs, BLOCK_K), pieces) * BLOCK_K, "BLOCK_K": BLOCK_K, "GROUP": GROUP}
    cut |= {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns}
    compiler = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    grid, sizes = (tile.programs(rows, outputs),), (rows, outputs, inputs)
    if not tile.tma:
        strides = x.stride(0), weight.stride(0)
        pointer_kernel[grid](x, weight, out, *sizes, *strides, PIECES=pieces, **cut, **compiler)
        return
    left = TensorDescriptor.from_tensor(x, [tile.rows, BLOCK_K])
    right = TensorDescriptor.from_tensor(weight, [tile.columns, BLOCK_K])
    if not tile.split:
        extra = TensorDescriptor.from_tensor(weight, [tile.extra, BLOCK_K]) if tile.extra else right
        whole_kernel[grid](left, right, extra, out, *sizes, PIECES=pieces, EXTRA=tile.extra, **cut, **compiler)
        return
    partial = torch.empty((pieces, rows, outputs), dtype=torch.float32, device=x.device)
    # The sums' programs may be launched, and wait, while the last pieces end.
    early = x.is_cuda
    split_kernel[(*grid, pieces)](left, right, partial, *sizes, SWAPPED=tile.swapped, EARLY=early, **cut, **compiler)
    fold_kernel[(triton.cdiv(out.numel(), FOLD_BLOCK),)](
        partial, out, out.numel(), PIECES=pieces, BLOCK=FOLD_BLOCK, EARLY=early, num_warps=4, launch_pdl=early,
        enable_fp_fusion=False,
    )  # fmt: skip
