"""x @ weight.T in Triton with bits that do not depend on the batch.

An element is one chain of products over K in ascending steps of a constant BLOCK_K: no split of K, no atomics, no
tuner. Rows of a tile do not meet in an MMA, so the tile may follow the number of rows (configs.py).

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

from forkpoint.kernels.matmul.configs import BLOCK_K, BLOCK_K_FP32, FP32, Tile, tile_for

TMA_ALIGNMENT: Final = 16
"""Bytes: a TMA descriptor's base and row stride are multiples of it."""
ROWS_MAX: Final = 1 << 31
"""Row and column numbers are int32 (offsets are int64)."""


@triton.jit
def swizzled(index, row_tiles, column_tiles, GROUP: tl.constexpr):
    """Tile (row, column) of a place in the order: GROUP rows down, then the next column."""
    band = index // (GROUP * column_tiles)
    height = tl.minimum(row_tiles - band * GROUP, GROUP)
    inner = index - band * GROUP * column_tiles
    return band * GROUP + inner % height, inner // height


@triton.jit(do_not_specialize=["rows"])
def linear_kernel(
    x, weight, out, rows, outputs, inputs, x_stride, weight_stride, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
):  # fmt: skip
    """One tile a program, operands by pointers."""
    m, n = swizzled(tl.program_id(0), tl.cdiv(rows, BLOCK_M), tl.cdiv(outputs, BLOCK_N), GROUP)
    row = m * BLOCK_M + tl.arange(0, BLOCK_M)
    column = n * BLOCK_N + tl.arange(0, BLOCK_N)
    step = tl.arange(0, BLOCK_K)
    left = x + row.to(tl.int64)[:, None] * x_stride + step[None, :]
    right = weight + column.to(tl.int64)[None, :] * weight_stride + step[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, inputs, BLOCK_K):
        if EVEN_K:
            a = tl.load(left, mask=row[:, None] < rows, other=0.0)
            b = tl.load(right, mask=column[None, :] < outputs, other=0.0)
        else:
            a = tl.load(left, mask=(row[:, None] < rows) & (step[None, :] < inputs - k), other=0.0)
            b = tl.load(right, mask=(column[None, :] < outputs) & (step[:, None] < inputs - k), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K
    place = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=(row[:, None] < rows) & (column[None, :] < outputs))


@triton.jit(do_not_specialize=["rows"])
def persistent_kernel(
    x, weight, out, rows, outputs, inputs, out_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """PROGRAMS programs walk all tiles; x and weight are TMA descriptors, which read 0 beyond their edges."""
    row_tiles = tl.cdiv(rows, BLOCK_M)
    column_tiles = tl.cdiv(outputs, BLOCK_N)
    for index in tl.range(tl.program_id(0), row_tiles * column_tiles, PROGRAMS, flatten=True):
        m, n = swizzled(index, row_tiles, column_tiles, GROUP)
        total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, inputs, BLOCK_K):
            a = x.load([m * BLOCK_M, k])
            b = weight.load([n * BLOCK_N, k])
            total = tl.dot(a, b.T, total)
        row = m * BLOCK_M + tl.arange(0, BLOCK_M)
        column = n * BLOCK_N + tl.arange(0, BLOCK_N // 2)
        place = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
        # In halves: a whole fp32 tile on its way to memory does not fit shared memory beside the pipeline.
        left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        inside = (row[:, None] < rows) & (column[None, :] < outputs)
        tl.store(place, left.to(out.dtype.element_ty), mask=inside)
        inside = (row[:, None] < rows) & (column[None, :] + BLOCK_N // 2 < outputs)
        tl.store(place + BLOCK_N // 2, right.to(out.dtype.element_ty), mask=inside)


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


def why_not_persistent(x: Tensor, weight: Tensor) -> str | None:
    """Why the persistent form does not take a call that `linear` takes, or None."""
    if x.dtype != torch.bfloat16:
        return "the persistent form multiplies bf16 only"
    if 0 in (*x.shape, *weight.shape):
        return "a descriptor cannot be empty"
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.data_ptr() % TMA_ALIGNMENT or tensor.stride(0) * tensor.element_size() % TMA_ALIGNMENT:
            return f"{name}: base and row stride must be multiples of {TMA_ALIGNMENT} bytes for TMA"
    return None


def architecture(device: torch.device) -> str:
    """Key of the pinned table: sm_90 for an H200, "interpreter" without a GPU."""
    if device.type != "cuda":
        return "interpreter"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.float32, tile: Tile | None = None) -> Tensor:
    """x @ weight.T: x [M, K], weight [N, K] -> [M, N]. `tile` overrides the pinned one, for tests and tuning.

    Raises ValueError with `why_not`'s reason, or for a persistent `tile` given where descriptors cannot be made.
    """
    if reason := why_not(x, weight):
        raise ValueError(reason)
    rows, inputs = x.shape
    outputs = weight.shape[0]
    out = torch.empty((rows, outputs), dtype=dtype, device=x.device)
    if not out.numel():
        return out
    chosen = tile or (FP32 if x.dtype == torch.float32 else tile_for(architecture(x.device), rows, outputs, inputs))
    if chosen.persistent:
        reason = why_not_persistent(x, weight)
        if reason is None:
            _launch_persistent(x, weight, out, chosen)
            return out
        if tile is not None:
            raise ValueError(reason)
    block_k = BLOCK_K_FP32 if x.dtype == torch.float32 else BLOCK_K
    programs = triton.cdiv(rows, chosen.rows) * triton.cdiv(outputs, chosen.columns)
    linear_kernel[(programs,)](
        x, weight, out, rows, outputs, inputs, x.stride(0), weight.stride(0), out.stride(0),
        BLOCK_M=chosen.rows, BLOCK_N=chosen.columns, BLOCK_K=block_k, GROUP=chosen.group,
        EVEN_K=inputs % block_k == 0, num_warps=chosen.warps, num_stages=chosen.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _launch_persistent(x: Tensor, weight: Tensor, out: Tensor, tile: Tile) -> None:
    (rows, inputs), outputs = x.shape, weight.shape[0]
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(outputs, tile.columns)
    programs = min(tiles, _programs(x.device))
    persistent_kernel[(programs,)](
        TensorDescriptor.from_tensor(x, [tile.rows, BLOCK_K]),
        TensorDescriptor.from_tensor(weight, [tile.columns, BLOCK_K]),
        out, rows, outputs, inputs, out.stride(0),
        BLOCK_M=tile.rows, BLOCK_N=tile.columns, BLOCK_K=BLOCK_K, GROUP=tile.group, PROGRAMS=programs,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
