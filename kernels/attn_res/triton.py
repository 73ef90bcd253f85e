"""Attention Residuals in Triton: the residual sum, the mixture over earlier blocks' sums, and the norm of it.

One program a row, its shape from the width alone. Sources come one after another in ascending order, each read once:
the largest score so far is taken out of the shares as they are added (what was added before is scaled by
exp(old - new)). Row sums are the tree of norm/triton.py.

| argument | dtype | shape |
| --- | --- | --- |
| bank | bf16 or fp32, rows contiguous | [n, R, D], n >= 0 |
| x, delta | bf16 or fp32, rows contiguous | [R, D] |
| mix, weight | bf16 or fp32, contiguous | [D] |
| sum, result | that of x, `dtype` | [R, D] |
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.kernels.norm import triton as norm
from forkpoint.kernels.norm.triton import row_sum

VALUES_A_WARP: Final = 512
"""16 values a thread: a source, the mixture and a tree of sums are in registers together."""
WARPS_MAX: Final = 16
WIDTH_MAX: Final = 2 * VALUES_A_WARP * WARPS_MAX


@triton.jit
def two_sums(source, key, LEVELS: tl.constexpr):
    """Sums of source^2 and of source * key [1, D], in one tree: [1] each."""
    both = tl.permute(tl.join(source * source, source * key), (0, 2, 1))
    sums = row_sum(tl.reshape(both, (2, 1 << LEVELS)), 2, LEVELS)
    return tl.split(tl.reshape(sums, (1, 2)))


@triton.jit
def add_source(source, mixed, total, largest, key, width, eps, LEVELS: tl.constexpr):
    """(mixture [1, D], sum of shares, largest score) with one source more, the last two [1]."""
    squares, product = two_sums(source, key, LEVELS)
    score = product * tl.rsqrt(squares / width + eps)
    new = tl.maximum(largest, score)
    kept, share = tl.exp(largest - new), tl.exp(score - new)
    return mixed * kept[:, None] + source * share[:, None], total * kept + share, new


@triton.jit
def mix_norm_kernel(
    bank, x, delta, mix, weight, total_out, out, sources, bank_stride, bank_row, x_row, delta_row, width, eps,
    ADD: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """One row: x + delta, stored; the mixture of the bank's `sources` and that sum; its norm."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, 1 << LEVELS)[None, :]
    inside = column < width
    key = tl.load(mix + column, mask=inside, other=0.0).to(tl.float32)
    mixed = tl.zeros((1, 1 << LEVELS), dtype=tl.float32)
    total = tl.zeros((1,), dtype=tl.float32)
    largest = tl.full((1,), float("-inf"), dtype=tl.float32)
    place = bank + row * bank_row + column
    for _ in range(sources):
        source = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        mixed, total, largest = add_source(source, mixed, total, largest, key, width, eps, LEVELS)
        place += bank_stride
    source = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        source += tl.load(delta + row * delta_row + column, mask=inside, other=0.0).to(tl.float32)
        rounded = source.to(total_out.dtype.element_ty)
        tl.store(total_out + row * width + column, rounded, mask=inside)
        source = rounded.to(tl.float32)
    mixed, total, largest = add_source(source, mixed, total, largest, key, width, eps, LEVELS)
    mixed = mixed / total[:, None]
    value = mixed * tl.rsqrt(row_sum(mixed * mixed, 1, LEVELS) / width + eps)
    value = value * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=inside)


def shape_for(width: int) -> tuple[int, int]:
    """(levels of the tree, warps) of a row, from the width alone."""
    levels = max(width - 1, 0).bit_length()
    return levels, max(4, min(WARPS_MAX, (1 << levels) // VALUES_A_WARP))


def why_not(bank: Tensor, x: Tensor, *others: Tensor) -> str | None:
    """Why the kernel does not take a call, or None."""
    if x.dim() != 2 or bank.dim() != 3 or bank.shape[1:] != x.shape:
        return f"bank {tuple(bank.shape)} and x {tuple(x.shape)} are not [n, R, D] and [R, D]"
    if x.shape[1] > WIDTH_MAX:
        return f"a row has {x.shape[1]} values, the kernel takes 1 to {WIDTH_MAX}"
    return norm.why_not(x, bank, *others)


def mix_norm(
    bank: Tensor, x: Tensor, delta: Tensor | None, mix: Tensor, weight: Tensor, eps: float,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(x + delta, rms_norm of the mixture of bank and that sum), as in the table above.

    Raises ValueError with a reason.
    """
    operands = [mix, weight] if delta is None else [mix, weight, delta]
    if reason := why_not(bank, x, *operands):
        raise ValueError(reason)
    if delta is not None and delta.shape != x.shape:
        raise ValueError(f"delta has shape {tuple(delta.shape)}, x {tuple(x.shape)}")
    rows, width = x.shape
    out = torch.empty((rows, width), dtype=dtype or x.dtype, device=x.device)
    total = x if delta is None else torch.empty((rows, width), dtype=x.dtype, device=x.device)
    if rows:
        levels, warps = shape_for(width)
        other = x if delta is None else delta
        mix_norm_kernel[(rows,)](
            bank, x, other, mix, weight, total, out, bank.shape[0], bank.stride(0), bank.stride(1), x.stride(0),
            other.stride(0), width, eps, ADD=delta is not None, LEVELS=levels, num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
    return total, out
