"""Products in blocks of fixed shape.

A BLAS picks its loop order by the shape of a product, so a row of `x @ w.T` has other bits alone than among others.
For a fixed (M, K, N) the bits of an item of a batched product depend on that item only, whatever the batch count.
MKL makes one exception, found by tests/kernels/test_allow_list.py: with a transposed right operand of fewer than 12
columns they depend on where the operand lies in memory.
"""

from typing import Final

import torch
from torch import Tensor

BLOCK_ROWS: Final = 16
"""Rows of a block: the smallest M of a tensor-core product, and one tile of tokens."""
MIN_COLUMNS: Final = 16
"""Fewest columns of a product with a transposed right operand."""


def bmm_fixed(a: Tensor, b: Tensor) -> Tensor:
    """Batched product [B, M, K] x [B, K, N] -> [B, M, N], fp32; an item's bits depend on that item and (M, K, N) only.

    Each operand may be row-major or transposed (one of its last two strides is 1); a batch stride of 0 repeats an item
    without a copy. Raises ValueError for other strides, for which torch takes another path.
    """
    if b.shape[2] < MIN_COLUMNS and b.stride(2) != 1:
        b = b.contiguous()
    for name, operand in (("a", a), ("b", b)):
        if 1 not in operand.stride()[1:]:
            raise ValueError(f"{name} has strides {operand.stride()}: one of the last two must be 1")
    return _product(a, b)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The batched product. cuBLAS picks its kernel by the batch count too, so on a GPU the items go one by one: exact,
    and slow until the Triton twin is there."""
    if not a.is_cuda:
        return torch.bmm(a, b)
    out = a.new_empty((a.shape[0], a.shape[1], b.shape[2]))
    for item in range(a.shape[0]):
        torch.bmm(a[item : item + 1], b[item : item + 1], out=out[item : item + 1])
    return out


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in blocks of 16 rows: x [R, K] fp32, weight [N, K] fp32 contiguous -> [R, N] fp32, contiguous.

    The last block is padded with zero rows. Raises ValueError when the inner dimensions differ.
    """
    rows, inner = x.shape
    outputs = weight.shape[0]
    if weight.shape[1] != inner:
        raise ValueError(f"weight takes {weight.shape[1]} inputs, x has {inner}")
    if rows == 0:
        return x.new_empty((0, outputs))
    blocks = -(-rows // BLOCK_ROWS)
    # A fresh copy, so that the operand is aligned and contiguous wherever x came from.
    padded = x.new_zeros((blocks * BLOCK_ROWS, inner))
    padded[:rows] = x
    if outputs < MIN_COLUMNS:
        wide = weight.new_zeros((MIN_COLUMNS, inner))
        wide[:outputs] = weight
        weight = wide
    shared = weight.t().expand(blocks, -1, -1)
    product = _product(padded.view(blocks, BLOCK_ROWS, inner), shared).view(blocks * BLOCK_ROWS, -1)
    return product[:rows, :outputs].contiguous()


def per_head_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, H, A] times weight [H, A, B] head by head: [R, H, B].

    In blocks of 16 rows, the last one padded with zeros, so that a row's bits do not depend on how many rows there are.
    """
    rows, heads, width = x.shape
    if rows == 0:
        return x.new_empty(0, heads, weight.shape[2])
    blocks = -(-rows // BLOCK_ROWS)
    padded = x.new_zeros(heads, blocks * BLOCK_ROWS, width)
    padded[:, :rows] = x.transpose(0, 1)
    # The same items either way, so the same bits: fewer calls by block when decoding, by head when prefilling.
    if blocks <= heads:
        products = [bmm_fixed(padded[:, i * BLOCK_ROWS : (i + 1) * BLOCK_ROWS], weight) for i in range(blocks)]
        out = torch.cat(products, dim=1)
    else:
        rows_of = padded.view(heads, blocks, BLOCK_ROWS, width)
        products = [bmm_fixed(rows_of[h], weight[h].expand(blocks, -1, -1)) for h in range(heads)]
        out = torch.stack(products).view(heads, blocks * BLOCK_ROWS, -1)
    return out[:, :rows].transpose(0, 1)
