"""SwiGLU and the sigmoid output gate in Triton: elementwise, so their blocks may be anything.

gate and up: bf16 or fp32, [R, F], rows contiguous (both may be parts of one product); result [R, F] in `dtype`.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK: Final = 1024
DTYPES: Final = (torch.bfloat16, torch.float32)


@triton.jit
def swiglu_kernel(gate, up, out, gate_stride, up_stride, width, SILU: tl.constexpr, BLOCK: tl.constexpr):
    """One block of one row: silu(gate) * up in fp32, or sigmoid(gate) * up."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    opening = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    numerator = opening if SILU else 1.0
    value = numerator / (1.0 + tl.exp(-opening)) * value
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def why_not(gate: Tensor, up: Tensor) -> str | None:
    """Why the kernel does not take a call, or None."""
    if gate.dim() != 2 or gate.shape != up.shape:
        return f"gate {tuple(gate.shape)} and up {tuple(up.shape)} are not one [R, F]"
    for tensor in (gate, up):
        if tensor.dtype not in DTYPES:
            return f"{tensor.dtype} is neither bf16 nor fp32"
        if tensor.stride(1) != 1:
            return "the values of a row are not contiguous"
    return None


def _launch(gate: Tensor, up: Tensor, dtype: torch.dtype | None, silu: bool) -> Tensor:
    if reason := why_not(gate, up):
        raise ValueError(reason)
    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=dtype or up.dtype, device=gate.device)
    if out.numel():
        swiglu_kernel[(rows, triton.cdiv(width, BLOCK))](
            gate, up, out, gate.stride(0), up.stride(0), width,
            SILU=silu, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def swiglu(gate: Tensor, up: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """silu(gate) * up: [R, F] and [R, F] -> [R, F]. Raises ValueError with `why_not`'s reason."""
    return _launch(gate, up, dtype, True)


def sigmoid_gate(x: Tensor, gate: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x * sigmoid(gate): [R, F] and [R, F] -> [R, F], MLA's output gate. Raises ValueError with `why_not`'s reason."""
    return _launch(gate, x, dtype, False)
