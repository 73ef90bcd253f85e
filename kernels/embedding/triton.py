"""Gather of embedding rows in Triton: a copy, so its blocks may be anything.

ids: int32 or int64, [R], each 0 .. V-1 (checked by the caller: the kernel reads where they point). table: [V, D], rows
contiguous; result [R, D] in `dtype` (None: that of the table).
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 2048


@triton.jit
def gather_kernel(ids, table, out, table_stride, width, BLOCK: tl.constexpr):
    """One block of one row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(ids + row).to(tl.int64)
    value = tl.load(table + token * table_stride + column, mask=inside)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def why_not(ids: Tensor, table: Tensor) -> str | None:
    """Why `gather` does not take a call, or None."""
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        return f"ids are {ids.dtype} {tuple(ids.shape)}, not int32 or int64 [R]"
    if table.dim() != 2 or 1 not in (table.stride(1), table.shape[1]):
        return "the table is not [V, D] with contiguous rows"
    return None


def gather(ids: Tensor, table: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """table[ids]: [R] and [V, D] -> [R, D]. Raises ValueError with `why_not`'s reason."""
    if reason := why_not(ids, table):
        raise ValueError(reason)
    width = table.shape[1]
    out = torch.empty((ids.shape[0], width), dtype=dtype or table.dtype, device=table.device)
    if out.numel():
        gather_kernel[(ids.shape[0], triton.cdiv(width, BLOCK))](
            ids.contiguous(), table, out, table.stride(0), width, BLOCK=BLOCK, num_warps=8
        )
    return out
