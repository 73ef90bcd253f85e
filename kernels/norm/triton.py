"""Row norms in Triton, with the residual sum before one fused in where a layer wants it.

A row's sum is a binary tree over neighbours (`row_sum`): its order is written down, so it follows neither the layout
that the compiler picks (which depends on the alignment of pointers), nor warps, nor how many rows a program owns.
Nothing is fused by the compiler (`enable_fp_fusion=False`): the square of a bf16 value is exact in fp32 anyway.

| argument | dtype | shape |
| --- | --- | --- |
| x, o, gate, delta | bf16 or fp32, rows contiguous | [..., D] |
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
VALUES: Final = 2048
"""Values of a program that owns several narrow rows."""
DTYPES: Final = (torch.bfloat16, torch.float32)


@triton.jit
def row_sum(x, ROWS: tl.constexpr, LEVELS: tl.constexpr):
    """Sum of each row of x [ROWS, 2^LEVELS], neighbours first: [ROWS, 1]. No step adds more than two values."""
    for _ in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, (ROWS, x.shape[1] // 2, 2)), axis=2)
    return x


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x, delta, gate, weight, total_out, out, rows, row_stride, delta_stride, gate_stride, width, eps,
    ADD: tl.constexpr, MEAN: tl.constexpr, WEIGHTED: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """ROWS rows: (x + delta) * rsqrt(sum or mean of squares + eps), times the weight, times sigmoid(gate)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, 1 << LEVELS)[None, :]
    inside = (row[:, None] < rows) & (column < width)
    row = row.to(tl.int64)[:, None]
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(delta + row * delta_stride + column, mask=inside, other=0.0).to(tl.float32)
        # The norm is that of the stored sum: the two in one call give what they give one after the other.
        rounded = value.to(total_out.dtype.element_ty)
        tl.store(total_out + row * width + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    squares = row_sum(value * value, ROWS, LEVELS)
    if MEAN:
        squares = squares / width
    value = value * tl.rsqrt(squares + eps)
    if WEIGHTED:
        value = value * tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    if GATED:
        opening = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        value = value * (1.0 / (1.0 + tl.exp(-opening)))
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def shape_for(width: int) -> tuple[int, int, int]:
    """(rows a program, levels of the tree, warps): 16 to 32 values a thread, from the width alone."""
    levels = max(width - 1, 0).bit_length()
    rows = max(1, VALUES >> levels)
    return rows, levels, max(4, min(16, (rows << levels) // 1024))


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
    x: Tensor, delta: Tensor | None, gate: Tensor | None, weight: Tensor | None, eps: float, mean: bool,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    operands = [t for t in (delta, gate, weight) if t is not None]
    if reason := why_not(x, *operands):
        raise ValueError(reason)
    width = x.shape[-1]
    rows = x.reshape(-1, width)
    gates = rows if gate is None else gate.reshape(-1, width)
    deltas = rows if delta is None else delta.reshape(-1, width)
    out = torch.empty(rows.shape, dtype=dtype or x.dtype, device=x.device)
    total = out if delta is None else torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    if rows.shape[0]:
        owned, levels, warps = shape_for(width)
        norm_kernel[(triton.cdiv(rows.shape[0], owned),)](
            rows, deltas, gates, rows if weight is None else weight, total, out, rows.shape[0],
            rows.stride(0), deltas.stride(0), gates.stride(0), width, eps,
            ADD=delta is not None, MEAN=mean, WEIGHTED=weight is not None, GATED=gate is not None,
            ROWS=owned, LEVELS=levels, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return total.view(x.shape), out.view(x.shape)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """weight * (x * rsqrt(mean(x^2) + eps)): x [..., D], weight [D]. Raises ValueError with `why_not`'s reason."""
    return _launch(x, None, None, weight, eps, True, dtype)[1]


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """(x + delta in the dtype of x, its rms_norm): x and delta [..., D], weight [D]. The step between two blocks.

    Raises ValueError with `why_not`'s reason.
    """
    if delta.shape != x.shape:
        raise ValueError(f"delta has shape {tuple(delta.shape)}, x {tuple(x.shape)}")
    return _launch(x, delta, None, weight, eps, True, dtype)


def l2_norm(x: Tensor, eps: float = 1e-6, dtype: torch.dtype | None = None) -> Tensor:
    """x / sqrt(sum(x^2) + eps): x [..., K]. Raises ValueError with `why_not`'s reason."""
    return _launch(x, None, None, None, eps, False, dtype)[1]


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """rms_norm(o) * sigmoid(gate): o and gate [..., V], weight [V]. Raises ValueError with `why_not`'s reason."""
    if gate.shape != o.shape:
        raise ValueError(f"gate has shape {tuple(gate.shape)}, o {tuple(o.shape)}")
    return _launch(o, None, gate, weight, eps, True, dtype)[1]
