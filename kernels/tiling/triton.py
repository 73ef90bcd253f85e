"""Device functions of tiled products: the order of tiles, one inner step, and where a tile's elements go."""

import triton
import triton.language as tl


@triton.jit
def swizzled(index, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Tile (row, column) of a place in the order: GROUP rows down, then the next column."""
    band = index // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - band * GROUP, GROUP)
    inner = index - band * GROUP * column_tiles
    return band * GROUP + inner % height, inner // height


@triton.jit
def store_tile(out, total, row, column, rows, outputs, out_stride, SWAPPED: tl.constexpr):
    """A tile's elements to their places; [columns, rows] where the weights stood on the M side."""
    if SWAPPED:
        place = out + row.to(tl.int64)[None, :] * out_stride + column[:, None]
        inside = (row[None, :] < rows) & (column[:, None] < outputs)
    else:
        place = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        inside = (row[:, None] < rows) & (column[None, :] < outputs)
    tl.store(place, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def step_product(a, b, total, SWAPPED: tl.constexpr):
    """One inner step: a [rows, BLOCK_K] of x, b [columns, BLOCK_K] of the weights."""
    return tl.dot(b, a.T, total, input_precision="ieee") if SWAPPED else tl.dot(a, b.T, total, input_precision="ieee")
