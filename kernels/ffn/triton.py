"""The gated activations and the sigmoid output gate in Triton: elementwise, so their blocks may be anything.

gate and up: bf16 or fp32, [R, F], rows contiguous (both may be parts of one product); result [R, F] in `dtype`.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.kernels.ffn.activation import SILU, Activation

BLOCK: Final = 1024
DTYPES: Final = (torch.bfloat16, torch.float32)
TANH_SERIES = tl.constexpr(0.25)
"""Below this tanh is its series: from exp it would lose digits there, and SiTU's up projection is mostly there."""


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), fp32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Hyperbolic tangent, fp32: a series of five terms near 0, else (1 - t) / (1 + t) of t = exp(-2 |x|) <= 1.

    Not the device library's: its bits follow the library, and the interpreter has none.
    """
    square = x * x
    series = 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    small = x * (series * square + 1.0)
    decay = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < TANH_SERIES, small, tl.where(x < 0.0, -large, large))


@triton.jit
def activate(gate, up, beta, linear_beta, NAME: tl.constexpr, CAPPED: tl.constexpr):
    """An `Activation` of gate and up, or their `sigmoid` gate, fp32. CAPPED: there is a linear_beta."""
    if NAME == "sigmoid":
        return sigmoid(gate) * up
    if NAME == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    opening = tanh(gate / beta) * beta * sigmoid(gate)
    if CAPPED:
        up = tanh(up / linear_beta) * linear_beta
    return opening * up


@triton.jit
def glu_kernel(
    gate, up, out, gate_stride, up_stride, width, beta, linear_beta,
    NAME: tl.constexpr, CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of one row, in fp32."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    opening = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = activate(opening, value, beta, linear_beta, NAME, CAPPED)
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


def caps(activation: Activation) -> tuple[float, float, bool]:
    """(beta, linear_beta, whether there is one) as kernels take them."""
    linear = activation.linear_beta
    return float(activation.beta), 1.0 if linear is None else float(linear), linear is not None


def _launch(gate: Tensor, up: Tensor, dtype: torch.dtype | None, name: str, activation: Activation) -> Tensor:
    if reason := why_not(gate, up):
        raise ValueError(reason)
    rows, width = gate.shape
    out = torch.empty((rows, width), dtype=dtype or up.dtype, device=gate.device)
    beta, linear_beta, capped = caps(activation)
    if out.numel():
        glu_kernel[(rows, triton.cdiv(width, BLOCK))](
            gate, up, out, gate.stride(0), up.stride(0), width, beta, linear_beta,
            NAME=name, CAPPED=capped, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def glu(gate: Tensor, up: Tensor, activation: Activation = SILU, dtype: torch.dtype | None = None) -> Tensor:
    """The activation of gate [R, F] and up [R, F]: [R, F]. Raises ValueError with `why_not`'s reason."""
    return _launch(gate, up, dtype, activation.name, activation)


def sigmoid_gate(x: Tensor, gate: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x * sigmoid(gate): [R, F] and [R, F] -> [R, F], MLA's output gate. Raises ValueError with `why_not`'s reason."""
    return _launch(gate, x, dtype, "sigmoid", SILU)
