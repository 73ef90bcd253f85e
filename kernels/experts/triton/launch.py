"""The experts of one layer in Triton, with bits that do not depend on the batch: sort, two products, a weighted sum.

| argument | dtype | shape |
| --- | --- | --- |
| x | bf16, rows contiguous | [R, D] |
| routes.experts, .weights | int64, fp32, contiguous, in ascending expert | [R, k] |
| gate_up, down | bf16, or uint8 with scales uint8, contiguous | [E, 2 I, D], [E, D, I] |
| shared | bf16 or fp32, rows contiguous | [R, D] |
| result | bf16 | [R, D] |

Sums are fp32. What is between the two products is rounded to bf16 once, and so is each expert's row.
"""

from typing import Any, Final

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from forkpoint.kernels.experts.configs import BLOCK_K, BLOCK_K_PACKED, ExpertTile, ExpertTiles, tiles_for
from forkpoint.kernels.experts.format import GROUP
from forkpoint.kernels.experts.triton.places import Places, sort_by_expert
from forkpoint.kernels.experts.triton.products import combine_kernel, down_kernel, gate_up_kernel
from forkpoint.kernels.experts.weights import ExpertMatrix, Experts
from forkpoint.kernels.ffn.activation import Activation
from forkpoint.kernels.ffn.triton import caps
from forkpoint.kernels.matmul.triton import TMA_ALIGNMENT
from forkpoint.kernels.router.routes import Routes
from forkpoint.kernels.router.triton import EXPERTS_MAX, PER_TOKEN_MAX

INPUTS_MULTIPLE: Final = 8
"""Of both widths: rows of bf16 at multiples of 16 bytes, as TMA asks."""
CHOICES_MAX: Final = 1 << 31
"""Choices, and rows of all experts together, are numbered in int32 (offsets are int64)."""
COMBINE_BLOCK: Final = 1024


def why_not_sizes(experts: int, per_token: int, width: int, inner: int) -> str | None:
    """Why the kernels do not take a layer of these sizes, or None."""
    if not 0 < experts <= EXPERTS_MAX:
        return f"{experts} experts: 1 to {EXPERTS_MAX}"
    if not 0 < per_token <= PER_TOKEN_MAX:
        return f"{per_token} experts a token: 1 to {PER_TOKEN_MAX}"
    for name, size in (("read", width), ("have inside", inner)):
        if size % INPUTS_MULTIPLE or not size:
            return f"experts that {name} {size} values: only multiples of {INPUTS_MULTIPLE} can be copied by TMA"
    if experts * max(width, 2 * inner) >= CHOICES_MAX:
        return f"{experts} experts of {width} x {inner}: their rows do not fit int32"
    return None


def _why_not_matrix(name: str, matrix: ExpertMatrix, experts: int, outputs: int, inputs: int) -> str | None:
    parts = [(matrix.values, (experts, outputs, inputs), torch.bfloat16)]
    if matrix.scales is not None:
        if inputs % GROUP:
            return f"{name}: MXFP4 of {inputs} inputs, not a multiple of {GROUP}"
        parts = [
            (matrix.values, (experts, outputs, inputs // 2), torch.uint8),
            (matrix.scales, (experts, outputs, inputs // GROUP), torch.uint8),
        ]
    for tensor, shape, dtype in parts:
        if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not a contiguous {dtype} {shape}"
    if matrix.values.data_ptr() % TMA_ALIGNMENT:
        return f"{name} does not begin at a multiple of {TMA_ALIGNMENT} bytes"
    return None


def why_not(x: Tensor, routes: Routes, weights: Experts, shared: Tensor | None = None) -> str | None:
    """Why `experts_sum` does not take a call, or None."""
    if x.dim() != 2 or x.dtype != torch.bfloat16 or (x.stride(1) != 1 and x.shape[1] > 1):
        return f"x is {x.dtype} {tuple(x.shape)}, not bf16 [R, D] with contiguous rows"
    (rows, width), experts, per_token = x.shape, weights.down.values.shape[0], routes.experts.shape[1]
    if shared is not None and (shared.shape != x.shape or shared.stride(1) != 1):
        return f"shared has shape {tuple(shared.shape)}, x {tuple(x.shape)}"
    for tensor, dtype in ((routes.experts, torch.int64), (routes.weights, torch.float32)):
        if tensor.shape != (rows, per_token) or tensor.dtype != dtype or not tensor.is_contiguous():
            return f"routes are {tensor.dtype} {tuple(tensor.shape)}, not a contiguous {dtype} [{rows}, {per_token}]"
    inner = weights.gate_up.values.shape[1] // 2
    if reason := why_not_sizes(experts, per_token, width, inner):
        return reason
    if (weights.gate_up.scales is None) != (weights.down.scales is None):
        return "one matrix is MXFP4, the other is not"
    if rows * per_token >= CHOICES_MAX:
        return f"{rows} rows of {per_token} experts do not fit int32"
    return _why_not_matrix("gate_up", weights.gate_up, experts, 2 * inner, width) or _why_not_matrix(
        "down", weights.down, experts, width, inner
    )


def _cut(matrix: ExpertMatrix, tile: ExpertTile) -> tuple[TensorDescriptor, Tensor, dict[str, Any]]:
    """(descriptor of a matrix's values, its scales or something in their place, constants of a launch)."""
    packed = matrix.scales is not None
    block_k = BLOCK_K_PACKED if packed else BLOCK_K
    inputs = matrix.values.shape[2] * (2 if packed else 1)
    box = [tile.columns, block_k // 2 if packed else block_k]
    constants = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": block_k, "SWAPPED": tile.swapped}
    constants |= {
        "PACKED": packed,
        "EVEN_K": inputs % block_k == 0,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        "enable_fp_fusion": False,
    }
    scales = matrix.values if matrix.scales is None else matrix.scales
    return TensorDescriptor.from_tensor(matrix.values.flatten(0, 1), box), scales, constants


def _gate_up(
    x: Tensor, places: Places, matrix: ExpertMatrix, activation: Activation, per_token: int, tile: ExpertTile
) -> Tensor:
    choices, (experts, outputs, _) = places.order.shape[0], matrix.values.shape
    inner, inputs = outputs // 2, x.shape[1]
    values, scales, constants = _cut(matrix, tile)
    out = torch.empty((choices, inner), dtype=x.dtype, device=x.device)
    beta, linear_beta, capped = caps(activation)
    gate_up_kernel[(places.tiles.shape[0] * triton.cdiv(inner, tile.columns),)](
        x, values, scales, places.order, places.tiles, places.used, out, choices, experts, inputs, inner, x.stride(0),
        per_token, beta, linear_beta, NAME=activation.name, CAPPED=capped, **constants,
    )  # fmt: skip
    return out


def _down(x: Tensor, places: Places, matrix: ExpertMatrix, tile: ExpertTile) -> Tensor:
    (choices, inputs), (experts, outputs, _) = x.shape, matrix.values.shape
    values, scales, constants = _cut(matrix, tile)
    rows = TensorDescriptor.from_tensor(x, [tile.rows, constants["BLOCK_K"]])
    out = torch.empty((choices, outputs), dtype=x.dtype, device=x.device)
    down_kernel[(places.tiles.shape[0] * triton.cdiv(outputs, tile.columns),)](
        rows, values, scales, places.order, places.tiles, places.used, out, choices, experts, inputs, outputs,
        **constants,
    )  # fmt: skip
    return out


def combine(y: Tensor, weights: Tensor, shared: Tensor | None) -> Tensor:
    """Σ weight · y in ascending place, fp32, plus a row of `shared`: y [R, k, D], weights [R, k] fp32 -> [R, D]."""
    rows, per_token, width = y.shape
    out = torch.empty((rows, width), dtype=y.dtype, device=y.device)
    if out.numel():
        other = y if shared is None else shared
        combine_kernel[(rows, triton.cdiv(width, COMBINE_BLOCK))](
            y, weights, other, out, other.stride(0), width, PER_TOKEN=per_token, SHARED=shared is not None,
            BLOCK=COMBINE_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def experts_sum(
    x: Tensor,
    routes: Routes,
    weights: Experts,
    activation: Activation,
    shared: Tensor | None = None,
    tiles: ExpertTiles | None = None,
) -> Tensor:
    """Σ weight · expert(x) over each row's experts, plus its row of `shared`: [R, D] -> [R, D].

    `tiles` override the pinned ones, for tests and tuning. Raises ValueError with `why_not`'s reason.
    """
    if reason := why_not(x, routes, weights, shared):
        raise ValueError(reason)
    (rows, width), per_token, experts = x.shape, routes.experts.shape[1], weights.down.values.shape[0]
    if not rows:
        return torch.empty_like(x)
    chosen = tiles or tiles_for(rows * per_token, experts, weights.down.scales is not None)
    places = sort_by_expert(routes.experts, experts, chosen.gate_up.rows)
    inner = _gate_up(x, places, weights.gate_up, activation, per_token, chosen.gate_up)
    y = _down(inner, places, weights.down, chosen.down)
    return combine(y.view(rows, per_token, width), routes.weights, shared)
