"""Row norms in Triton: one row a program, its block and warps a function of the width alone.

A row's sum is a reduction whose tree follows the block and the warps, so neither may follow the batch. Nothing here
is fused by the compiler (`enable_fp_fusion=False`): the square of a bf16 value is exact in fp32 anyway.

| argument | dtype | shape |
| --- | --- | --- |
| x, o, gate | bf16 or fp32, rows contiguous | [..., D] |
| weight | bf16 or fp32, contiguous | [D] |
| result | that of x, or `dtype` | [..., D] |
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH_MAX: Final = 16384
"""One row must lie in one program's registers: 16 warps of 32 values a thread."""
DTYPES: Final = (torch.bfloat16, torch.float32)


@triton.jit
def norm_kernel(
    x, gate, weight, out, row_stride, gate_stride, width, eps,
    MEAN: tl.constexpr, WEIGHTED: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: x * rsqrt(sum or mean of squares + eps), times the weight, times sigmoid(gate)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.sum(value * value, axis=0)
    if MEAN:
        total = total / width
    value = value * tl.rsqrt(total + eps)
    if WEIGHTED:
        value = value * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        opening = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = value * (1.0 / (1.0 + tl.exp(-opening)))
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def warps(width: int) -> int:
    """Warps of a row's program: 32 values a thread at most, from the width alone."""
    block: int = triton.next_power_of_2(width)
    return max(1, min(16, block // 1024))


def why_not(x: Tensor, *others: Tensor) -> str | None:
    """Why these kernels do not take a call, or None."""
    width = x.shape[-1]
    if not 0 < width <= WIDTH_MAX:
        return f"a row has {width} values, the kernel takes 1 to {WIDTH_MAX}"
    for tensor in (x, *others):
        if tensor.dtype not in DTYPES:
            return f"{tensor.dtype} is neither bf16 nor fp32"
        if tensor.shape[-1] != width:
            return f"a row has {width} values, another operand's {tensor.shape[-1]}"
        if tensor.stride(-1) != 1:
            return "the values of a row are not contiguous"
    return None


def _launch(
    x: Tensor, gate: Tensor | None, weight: Tensor | None, eps: float, mean: bool, dtype: torch.dtype | None
) -> Tensor:
    operands = [t for t in (gate, weight) if t is not None]
    if reason := why_not(x, *operands):
        raise ValueError(reason)
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    gates = rows if gate is None else gate.reshape(-1, width)
    out = torch.empty(rows.shape, dtype=dtype or x.dtype, device=x.device)
    if rows.shape[0]:
        norm_kernel[(rows.shape[0],)](
            rows, gates, rows if weight is None else weight, out, rows.stride(0), gates.stride(0), width, eps,
            MEAN=mean, WEIGHTED=weight is not None, GATED=gate is not None, BLOCK=triton.next_power_of_2(width),
            num_warps=warps(width), enable_fp_fusion=False,
        )  # fmt: skip
    return out.view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """weight * (x * rsqrt(mean(x^2) + eps)): x [..., D], weight [D]. Raises ValueError with `why_not`'s reason."""
    return _launch(x, None, weight, eps, True, dtype)


def l2_norm(x: Tensor, eps: float = 1e-6, dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps): x [..., K]. Raises ValueError with `why_not`'s reason."""
    return _launch(x, None, None, eps, False, dtype)


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """rms_norm(o) * sigmoid(gate): o and gate [..., V], weight [V]. Raises ValueError with `why_not`'s reason."""
    if gate.shape != o.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, o {tuple(o.shape)}")
    return _launch(o, gate, weight, eps, True, dtype)
