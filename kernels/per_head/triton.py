"""A product of its own for each head in Triton: [R, H, A] x [H, A, B] -> [R, H, B], MLA's absorbed projections.

As in matmul/triton.py an element is one chain of products over A in ascending steps of BLOCK_K, and rows do not meet,
so the tile may follow the number of rows.

| argument | dtype | shape |
| --- | --- | --- |
| x | bf16, values of a head contiguous | [R, H, A] |
| weight | bf16, either of A and B contiguous | [H, A, B] |
| result | `dtype`, or written into `out`, values of a head contiguous | [R, H, B] |
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.kernels.matmul.configs import BLOCK_K, HEAD_TILES, HeadTile


@triton.jit(do_not_specialize=["rows"])
def per_head_kernel(
    x, weight, out, rows, inputs, outputs, x_row, x_head, weight_head, weight_input, weight_output, out_row, out_head,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of one head. Programs of one column tile lie side by side: they share its weights in L2."""
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    left = x + head * x_head + row.to(tl.int64)[:, None] * x_row + step[None, :]
    right = weight + head * weight_head + step[:, None] * weight_input + column[None, :] * weight_output
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, inputs, BLOCK_K):
        a = tl.load(left, mask=(row[:, None] < rows) & (step[None, :] < inputs - k), other=0.0)
        b = tl.load(right, mask=(step[:, None] < inputs - k) & (column[None, :] < outputs), other=0.0)
        total = tl.dot(a, b, total)
        left += BLOCK_K
        right += BLOCK_K * weight_input
    place = out + head * out_head + row.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < outputs))


HEADS_MAX: Final = 65_535
"""Heads are the third axis of the grid."""


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """Why `per_head_linear` does not take a call, or None."""
    if x.dim() != 3 or weight.dim() != 3 or x.shape[1:] != weight.shape[:2]:
        return f"x {tuple(x.shape)} and weight {tuple(weight.shape)} are not [R, H, A] and [H, A, B]"
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return f"x is {x.dtype}, weight {weight.dtype}: both must be bf16"
    if x.stride(2) != 1 or 1 not in weight.stride()[1:]:
        return "the values of a head are not contiguous"
    if x.shape[1] > HEADS_MAX:
        return f"{x.shape[1]} heads, at most {HEADS_MAX}"
    return None


def per_head_linear(
    x: Tensor,
    weight: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
    tile: HeadTile | None = None,
) -> Tensor:
    """x[:, h] @ weight[h] for every head: [R, H, A] and [H, A, B] -> [R, H, B].

    `out` takes the result instead of a new tensor, and may be a part of a wider one ([R, H, r + dr]); its dtype counts
    then. `tile` overrides the pinned one, for tests and tuning. Raises ValueError with `why_not`'s reason, or for an
    `out` of another shape.
    """
    if reason := why_not(x, weight):
        raise ValueError(reason)
    rows, heads, inputs = x.shape
    outputs = weight.shape[2]
    if out is None:
        out = torch.empty((rows, heads, outputs), dtype=dtype, device=x.device)
    if out.shape != (rows, heads, outputs) or out.stride(2) != 1:
        raise ValueError(f"out {tuple(out.shape)} is not [{rows}, {heads}, {outputs}] with contiguous values")
    if not out.numel():
        return out
    chosen = tile or next(t for t in HEAD_TILES if rows <= t.rows_max)
    grid = (triton.cdiv(rows, chosen.rows), triton.cdiv(outputs, chosen.columns), heads)
    per_head_kernel[grid](
        x, weight, out, rows, inputs, outputs, x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1),
        BLOCK_M=chosen.rows, BLOCK_N=chosen.columns, BLOCK_K=BLOCK_K,
        num_warps=chosen.warps, num_stages=chosen.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out
