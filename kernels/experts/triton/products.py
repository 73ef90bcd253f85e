"""The two grouped products: a tile of sorted rows times one expert's matrix, gate and up at once, then down.

An element is one chain of products over K in ascending steps of a constant BLOCK_K. Which rows share a tile, how many
there are, and where in the sorted order they lie is no part of its bits.
"""

import triton
import triton.language as tl

from forkpoint.kernels.experts.triton.mxfp4 import GROUP, decode
from forkpoint.kernels.experts.triton.places import END, EXPERT, FIELDS, FIRST
from forkpoint.kernels.ffn.triton import activate
from forkpoint.kernels.tiling.triton import step_product, store_tile

STRIDE = tl.constexpr(FIELDS)


@triton.jit
def groups_of(inputs, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Scales of a row, in a form that shows the compiler that those of one step are one aligned word, if they are."""
    return inputs // BLOCK_K * (BLOCK_K // GROUP) if EVEN_K else inputs // GROUP


@triton.jit
def scales_at(scales, row, k, all_rows, groups, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PACKED: tl.constexpr):
    """uint8 [ROWS, BLOCK_K / 32] of a matrix's scales, 1 beyond its end. Asked for a step ahead: they are too small to
    be copied to shared memory by themselves, and would be waited for."""
    if PACKED:
        line = row + tl.arange(0, ROWS)
        group = k // GROUP + tl.arange(0, BLOCK_K // GROUP)
        inside = (line[:, None] < all_rows) & (group[None, :] < groups)
        scale = tl.load(scales + line.to(tl.int64)[:, None] * groups + group[None, :], mask=inside, other=127)
    else:
        scale = 0
    return scale


@triton.jit
def weights_at(values, scale, row, k, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, PACKED: tl.constexpr):
    """bf16 [ROWS, BLOCK_K] of a matrix from (row, k) on; `values` is a TMA descriptor."""
    return decode(values.load([row, k // 2]), scale, ROWS, BLOCK_K) if PACKED else values.load([row, k])


@triton.jit(do_not_specialize=["choices"])
def gate_up_kernel(
    x, values, scales, order, tiles, used, out, choices, experts, inputs, outputs, x_stride, per_token, beta,
    linear_beta, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr,
    SWAPPED: tl.constexpr, PACKED: tl.constexpr, NAME: tl.constexpr, CAPPED: tl.constexpr,
):  # fmt: skip
    """act(x w1, x w3) of one tile's rows and columns -> out [choices, outputs], sorted by expert.

    x [R, inputs] is read at the rows of the choices. `values` describes [experts, 2 outputs, inputs] by rows.
    """
    column_tiles = tl.cdiv(outputs, BLOCK_N)
    tile = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * BLOCK_N
    if tile >= tl.load(used):
        return
    expert = tl.load(tiles + tile * STRIDE + EXPERT)
    end = tl.load(tiles + tile * STRIDE + END)
    place = tl.load(tiles + tile * STRIDE + FIRST) + tl.arange(0, BLOCK_M)
    row = tl.load(order + place, mask=place < end, other=0) // per_token
    step = tl.arange(0, BLOCK_K)
    left = x + row.to(tl.int64)[:, None] * x_stride + step[None, :]
    first, all_rows, groups = expert * 2 * outputs + column, experts * 2 * outputs, groups_of(inputs, BLOCK_K, EVEN_K)
    gate = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros_like(gate)
    gate_scale = scales_at(scales, first, 0, all_rows, groups, BLOCK_N, BLOCK_K, PACKED)
    up_scale = scales_at(scales, first + outputs, 0, all_rows, groups, BLOCK_N, BLOCK_K, PACKED)
    for k in range(0, inputs, BLOCK_K):
        next_gate = scales_at(scales, first, k + BLOCK_K, all_rows, groups, BLOCK_N, BLOCK_K, PACKED)
        next_up = scales_at(scales, first + outputs, k + BLOCK_K, all_rows, groups, BLOCK_N, BLOCK_K, PACKED)
        inside = place[:, None] < end
        if not EVEN_K:
            inside = inside & (step[None, :] < inputs - k)
        a = tl.load(left + k, mask=inside, other=0.0)
        b = weights_at(values, gate_scale, first, k, BLOCK_N, BLOCK_K, PACKED)
        gate = step_product(a, b, gate, SWAPPED)
        b = weights_at(values, up_scale, first + outputs, k, BLOCK_N, BLOCK_K, PACKED)
        up = step_product(a, b, up, SWAPPED)
        gate_scale, up_scale = next_gate, next_up
    value = activate(gate, up, beta, linear_beta, NAME, CAPPED)
    store_tile(out, value, place, column + tl.arange(0, BLOCK_N), end, outputs, outputs, SWAPPED)


@triton.jit(do_not_specialize=["choices"])
def down_kernel(
    x, values, scales, order, tiles, used, out, choices, experts, inputs, outputs,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, SWAPPED: tl.constexpr,
    PACKED: tl.constexpr,
):  # fmt: skip
    """x w2 of one tile's rows and columns -> out [choices, outputs], in the order of the choices.

    x [choices, inputs], sorted, and `values`, [experts, outputs, inputs] by rows, are TMA descriptors: what they read
    beyond an expert's rows is the next one's, and is not stored.
    """
    column_tiles = tl.cdiv(outputs, BLOCK_N)
    tile = tl.program_id(0) // column_tiles
    column = tl.program_id(0) % column_tiles * BLOCK_N
    if tile >= tl.load(used):
        return
    expert = tl.load(tiles + tile * STRIDE + EXPERT)
    begin = tl.load(tiles + tile * STRIDE + FIRST)
    place = begin + tl.arange(0, BLOCK_M)
    choice = tl.load(order + place, mask=place < tl.load(tiles + tile * STRIDE + END), other=choices)
    first, all_rows, groups = expert * outputs + column, experts * outputs, groups_of(inputs, BLOCK_K, EVEN_K)
    total = tl.zeros((BLOCK_N, BLOCK_M) if SWAPPED else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    scale = scales_at(scales, first, 0, all_rows, groups, BLOCK_N, BLOCK_K, PACKED)
    for k in range(0, inputs, BLOCK_K):
        ahead = scales_at(scales, first, k + BLOCK_K, all_rows, groups, BLOCK_N, BLOCK_K, PACKED)
        b = weights_at(values, scale, first, k, BLOCK_N, BLOCK_K, PACKED)
        total = step_product(x.load([begin, k]), b, total, SWAPPED)
        scale = ahead
    store_tile(out, total, choice, column + tl.arange(0, BLOCK_N), choices, outputs, outputs, SWAPPED)


@triton.jit
def combine_kernel(
    y, weights, shared, out, shared_stride, width, PER_TOKEN: tl.constexpr, SHARED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One block of one row: Σ weight · y [R, k, width] in ascending place, plus the row of `shared`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    place = row * PER_TOKEN
    value = tl.load(y + place * width + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(weights + place) * value
    for n in tl.static_range(1, PER_TOKEN):
        value = tl.load(y + (place + n) * width + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights + place + n) * value
    if SHARED:
        total += tl.load(shared + row * shared_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=inside)
