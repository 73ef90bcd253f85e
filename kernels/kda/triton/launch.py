"""Launches: a KDA layer's prefill and decode from conv inputs to o, moving the slots' state on in place.

Every launch forbids fused multiply-adds, so that a function means the same in each kernel that inlines it. Shapes are
pinned here by kernel, never by batch and never by timing.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from forkpoint.kernels.kda.tile import OpenRows
from forkpoint.kernels.kda.triton.decode import decode_kernel, factor_kernel, read_kernel
from forkpoint.kernels.kda.triton.limits import HEAD_SIZE, check_pool, check_rows, needs_two_references
from forkpoint.kernels.kda.triton.plan import PrefillPlan
from forkpoint.kernels.kda.triton.prepare import prepare_kernel
from forkpoint.kernels.kda.triton.recur import recur_kernel
from forkpoint.kernels.kda.triton.rows import keep_kernel, row_kernel
from forkpoint.limits import TILE_TOKENS


@dataclass(frozen=True)
class Shapes:
    """Block shapes and warps. Equal bits for all of them are a claim that a GPU test must bear out."""

    row_block: int = 8
    row_warps: int = 8
    prepare_warps: int = 2
    recur_values: int = 64
    recur_warps: int = 4
    recur_stages: int = 3
    decode_split: bool = True
    """Two kernels, see decode.py; factor_warps are the first one's."""
    factor_warps: int = 2
    decode_values: int = 64
    decode_warps: int = 4


PINNED: Final = Shapes()


@dataclass(frozen=True)
class KdaWeights:
    """What the kernels read of a layer."""

    conv: Tensor
    """[4, 3 H 128] contiguous, taps first (the twin has them last): tap 3 multiplies the current token; channels of q,
    then k, then v."""
    A_log: Tensor
    """[H] fp32."""
    dt_bias: Tensor
    """[H, 128] fp32."""
    lower_bound: float | None


@dataclass(frozen=True)
class KdaState:
    """One layer's slots, as StateTensors lays them out."""

    S: Tensor
    """[slots, H, 128, 128] fp32 or bf16: values by keys, at each slot's last grid point."""
    open_rows: OpenRows
    """k and v fp32 or bf16 (either holds bf16 numbers)."""
    conv_ring: Tensor
    """[slots, 4, 3 H 128] in the dtype of conv inputs."""
    conv_grid: Tensor
    """[slots, 3, 3 H 128] likewise."""


@dataclass(frozen=True)
class _Rows:
    """Row kernel's outputs, [R, H, ...]."""

    k: Tensor
    v: Tensor
    beta: Tensor


def _check(x: Tensor, z: Tensor, b: Tensor, state: KdaState) -> None:
    check_rows(x, z, b, state.S.shape[1])
    rows = {f"open {name}": tensor for name, tensor in vars(state.open_rows).items()}
    check_pool(state.S, {**rows, "conv_ring": state.conv_ring, "conv_grid": state.conv_grid}, x)


def _row_pass(
    x: Tensor,
    z: Tensor,
    b: Tensor,
    weights: KdaWeights,
    state: KdaState,
    facts: Tensor,
    to: _Rows | OpenRows,
    single: bool,
    shapes: Shapes,
) -> Tensor:
    """Runs the row kernel and returns q [R, H, 128] bf16."""
    count, heads = x.shape[0], state.S.shape[1]
    q = torch.empty((count, heads, HEAD_SIZE), dtype=torch.bfloat16, device=x.device)
    row_kernel[(triton.cdiv(count, shapes.row_block), heads)](
        *(x, z, b, weights.conv, weights.A_log, weights.dt_bias, state.conv_ring, state.conv_grid, facts),
        *(
            q,
            to.k,
            to.v,
            state.open_rows.g,
            to.beta,
            count,
            int(single),
            x.stride(0) // 8,
            z.stride(0) // 8,
            b.stride(0),
        ),
        weights.lower_bound or 0.0,
        HEAD_SIZE**-0.5,
        H=heads,
        BOUNDED=weights.lower_bound is not None,
        BR=shapes.row_block,
        num_warps=shapes.row_warps,
        enable_fp_fusion=False,
    )
    return q


def prefill(
    x: Tensor,
    z: Tensor,
    b: Tensor,
    weights: KdaWeights,
    state: KdaState,
    plan: PrefillPlan,
    checkpoints: Tensor | None = None,
    shapes: Shapes = PINNED,
) -> Tensor:
    """Consumes packed rows of any lengths and returns o [R, H, 128] bf16.

    x [R, 3 H 128] conv inputs, z [R, H 128] raw decay gate, b [R, H] logits of beta; checkpoints [*, H, 128, 128] fp32
    takes S at the plan's grid points. Raises ValueError for tensors that don't fit.
    """
    _check(x, z, b, state)
    rows, heads, tiles = x.shape[0], state.S.shape[1], plan.tiles.shape[0]
    if plan.has_checkpoints and (checkpoints is None or checkpoints.dtype != torch.float32):
        raise ValueError("the plan has checkpoints: a pool of fp32 rows must come with it")
    opened, bounded, bound = state.open_rows, weights.lower_bound is not None, weights.lower_bound or 0.0
    out = torch.empty((rows, heads, HEAD_SIZE), dtype=torch.bfloat16, device=x.device)
    if rows == 0:
        return out
    new = _Rows(
        k=torch.empty((rows, heads, HEAD_SIZE), dtype=opened.k.dtype, device=x.device),
        v=torch.empty((rows, heads, HEAD_SIZE), dtype=opened.v.dtype, device=x.device),
        beta=torch.empty((rows, heads), dtype=torch.float32, device=x.device),
    )
    q = _row_pass(x, z, b, weights, state, plan.rows, new, False, shapes)

    def workspace(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty((tiles, heads, *shape), dtype=dtype, device=x.device)

    kq, rest = workspace(2 * TILE_TOKENS, HEAD_SIZE), workspace(TILE_TOKENS, HEAD_SIZE)
    inverse, outputs = (workspace(TILE_TOKENS, TILE_TOKENS) for _ in range(2))
    decay = workspace(HEAD_SIZE, dtype=torch.float32)
    if tiles:
        prepare_kernel[(tiles, heads)](
            *(plan.tiles, plan.sequences, z, weights.A_log, weights.dt_bias, q, new.k, new.beta),
            *(opened.k, opened.g, opened.beta, kq, rest, inverse, outputs, decay, z.stride(0) // 8, bound),
            H=heads,
            BOUNDED=bounded,
            TWO_REFERENCES=needs_two_references(weights.lower_bound),
            num_warps=shapes.prepare_warps,
            enable_fp_fusion=False,
        )
    sequences = plan.sequences.shape[0]
    recur_kernel[(HEAD_SIZE // shapes.recur_values, heads, sequences)](
        *(plan.tiles, plan.sequences, new.v, opened.v, kq, rest, inverse, outputs, decay, state.S),
        *(state.S if checkpoints is None else checkpoints, out),
        H=heads,
        BV=shapes.recur_values,
        STAGES=shapes.recur_stages,
        num_warps=shapes.recur_warps,
        enable_fp_fusion=False,
    )
    keep_kernel[(sequences, heads)](
        *(x, z, weights.A_log, weights.dt_bias, state.conv_ring, state.conv_grid, plan.sequences),
        *(new.k, new.v, new.beta, opened.k, opened.v, opened.g, opened.beta, x.stride(0), z.stride(0) // 8, bound),
        H=heads,
        BOUNDED=bounded,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def decode(
    x: Tensor,
    z: Tensor,
    b: Tensor,
    weights: KdaWeights,
    state: KdaState,
    facts: Tensor,
    shapes: Shapes = PINNED,
) -> Tensor:
    """Consumes one row of each slot in `facts` (plan.decode_facts) and returns o [N, H, 128] bf16.

    Bit for bit what `prefill` returns for those rows, whatever the batch. Null slots get zeros. Reads no device memory
    on the host, so a CUDA graph may hold it. Raises ValueError for tensors that don't fit.
    """
    _check(x, z, b, state)
    count, heads = x.shape[0], state.S.shape[1]
    out = torch.empty((count, heads, HEAD_SIZE), dtype=torch.bfloat16, device=x.device)
    if count == 0:
        return out
    opened = state.open_rows
    q = _row_pass(x, z, b, weights, state, facts, opened, True, shapes)
    pinned = {"H": heads, "BV": shapes.decode_values, "num_warps": shapes.decode_warps, "enable_fp_fusion": False}
    two = needs_two_references(weights.lower_bound)
    grid = (HEAD_SIZE // shapes.decode_values, heads, count)
    if shapes.decode_split:
        factors = _factors(facts, q, opened, heads, two, shapes.factor_warps)
        read_kernel[grid](facts, opened.v, *factors, state.S, out, **pinned)
    else:
        cached = (opened.k, opened.v, opened.g, opened.beta)
        decode_kernel[grid](facts, q, *cached, state.S, out, TWO_REFERENCES=two, **pinned)
    return out


def _factors(
    facts: Tensor, q: Tensor, opened: OpenRows, heads: int, two_references: bool, warps: int
) -> tuple[Tensor, ...]:
    """Runs the factor kernel: k+ and q+, T Diag(beta), M's row, k 2^(G_15 - G), 2^G_15."""
    count = q.shape[0]

    def workspace(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty((count, heads, *shape), dtype=dtype, device=q.device)

    made = (
        workspace(2 * TILE_TOKENS, HEAD_SIZE),
        workspace(TILE_TOKENS, TILE_TOKENS),
        workspace(TILE_TOKENS),
        workspace(TILE_TOKENS, HEAD_SIZE),
        workspace(HEAD_SIZE, dtype=torch.float32),
    )
    factor_kernel[(heads, count)](
        *(facts, q, opened.k, opened.g, opened.beta, *made),
        H=heads,
        TWO_REFERENCES=two_references,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return made
