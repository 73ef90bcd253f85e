"""Launches: a KDA layer's prefill and decode from conv inputs to o, moving the slots' state on in place.

Every launch forbids fused multiply-adds, so that a function means the same in each kernel that inlines it. Shapes are
pinned here by kernel, GPU and the pool's dtype, never by batch and never by timing.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.kda.triton.decode import read_kernel, step_kernel
from forkpoint.kernels.kda.triton.hopper import hopper_recur_kernel
from forkpoint.kernels.kda.triton.keep import keep_kernel
from forkpoint.kernels.kda.triton.limits import check_pool, check_rows, needs_two_references
from forkpoint.kernels.kda.triton.plan import PrefillPlan
from forkpoint.kernels.kda.triton.prepare import prepare_kernel, values_kernel
from forkpoint.kernels.kda.triton.recur import recur_kernel
from forkpoint.kernels.kda.triton.state import HEAD_SIZE, KdaState, KdaWeights, OpenFactors
from forkpoint.limits import TILE_TOKENS

__all__ = ["PINNED", "KdaState", "KdaWeights", "OpenFactors", "Shapes", "decode", "prefill"]


@dataclass(frozen=True)
class Shapes:
    """Block shapes and warps. Equal bits for all of them are a claim that a GPU test must bear out."""

    prepare_warps: int = 1
    prepare_registers: int | None = 128
    prepare_keys: int = 64
    prepare_unroll: int = 2
    hopper: bool = True
    """The serial pass by hopper.py, where the GPU has its units, instead of recur.py."""
    hopper_stages: int = 4
    recur_values: int = 64
    recur_warps: int = 4
    recur_stages: int = 3
    step_warps: int = 1
    step_keys: int = 128
    read_values: int = 64
    read_warps: int = 4
    read_registers: int | None = None
    early: bool = True
    """Programmatic dependent launches: decode's kernels begin while the one before each of them ends."""


PINNED: Final = Shapes()
HOPPER_VALUES: Final = 64
HOPPER_WARPS: Final = 4
BF16_REGISTERS: Final = 96
"""Of read_kernel over a pool of bf16, whose S takes half of them: five programs fit a multiprocessor, not four."""


def pinned(pool: torch.dtype) -> Shapes:
    """The shapes of decode for a pool of S in this dtype."""
    return replace(PINNED, read_registers=BF16_REGISTERS) if pool == torch.bfloat16 else PINNED


@lru_cache
def has_hopper_units(device: torch.device) -> bool:
    """Whether hopper.py's instructions exist there: compute capability 9.0, no other."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _check(x: Tensor, z: Tensor, b: Tensor, state: KdaState) -> None:
    check_rows(x, z, b, state.S.shape[1])
    rows = {f"open {name}": tensor for name, tensor in vars(state.opened).items()}
    check_pool(state.S, {**rows, "conv_ring": state.conv_ring, "conv_grid": state.conv_grid}, x)


def _gate(weights: KdaWeights) -> dict[str, bool]:
    return {
        "BOUNDED": weights.lower_bound is not None,
        "TWO_REFERENCES": needs_two_references(weights.lower_bound),
    }


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
    rows, heads, tiles, sequences = x.shape[0], state.S.shape[1], plan.tiles.shape[0], plan.sequences.shape[0]
    if plan.has_checkpoints and (checkpoints is None or checkpoints.dtype != torch.float32):
        raise ValueError("the plan has checkpoints: a pool of fp32 rows must come with it")
    out = torch.empty((rows, heads, HEAD_SIZE), dtype=torch.bfloat16, device=x.device)
    if rows == 0:
        return out

    def workspace(count: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty((count, heads, *shape), dtype=dtype, device=x.device)

    opened, v, gate = state.opened, workspace(rows, HEAD_SIZE), _gate(weights)
    wide, square = (TILE_TOKENS, HEAD_SIZE), (TILE_TOKENS, TILE_TOKENS)
    factors = (
        *(workspace(tiles, *shape) for shape in ((2 * TILE_TOKENS, HEAD_SIZE), wide, square, square)),
        workspace(tiles, HEAD_SIZE, dtype=torch.float32),
    )
    references = workspace(tiles if gate["TWO_REFERENCES"] else 0, HEAD_SIZE, dtype=torch.int32)
    sums = (workspace(sequences, HEAD_SIZE, dtype=torch.int32) for _ in range(2))
    kept = (workspace(sequences, *wide), *sums)
    if tiles:
        values_kernel[(tiles, heads)](
            *(plan.tiles, plan.sequences, x, weights.conv, state.conv_ring, v, x.stride(0)),
            H=heads,
            num_warps=shapes.prepare_warps,
            enable_fp_fusion=False,
        )
        prepare_kernel[(tiles, heads)](
            *(plan.tiles, plan.sequences, x, z, b, weights.conv, weights.A_log, weights.dt_bias, state.conv_ring),
            *(opened.left, opened.right, opened.beta, opened.total, opened.reference, *factors, references, *kept),
            *(x.stride(0), z.stride(0), b.stride(0), weights.lower_bound or 0.0, HEAD_SIZE**-0.5),
            H=heads,
            num_warps=shapes.prepare_warps,
            UNROLL=shapes.prepare_unroll,
            KEYS=shapes.prepare_keys,
            maxnreg=shapes.prepare_registers,
            enable_fp_fusion=False,
            **gate,
        )
    saved = state.S if checkpoints is None else checkpoints
    tensors = (plan.tiles, plan.sequences, v, *factors, state.S, saved, out, opened.v)
    _serial_pass(tensors, heads, sequences, shapes, has_hopper_units(x.device))
    keep_kernel[(heads, sequences)](
        *(plan.sequences, x, b, v, factors[1], *kept, out, state.conv_ring, state.conv_grid),
        *(opened.left, opened.right, opened.v, opened.beta, opened.total, opened.reference),
        *(x.stride(0), b.stride(0)),
        H=heads,
        enable_fp_fusion=False,
    )
    return out


def _serial_pass(tensors: tuple[Tensor, ...], heads: int, sequences: int, shapes: Shapes, hopper: bool) -> None:
    """hopper.py's kernel or recur.py's, whose arguments `tensors` are."""
    if hopper and shapes.hopper:
        hopper_recur_kernel[(HEAD_SIZE // HOPPER_VALUES, heads, sequences)](
            *tensors,
            H=heads,
            BV=HOPPER_VALUES,
            STAGES=shapes.hopper_stages,
            num_warps=HOPPER_WARPS,
            enable_fp_fusion=False,
        )
    else:
        recur_kernel[(HEAD_SIZE // shapes.recur_values, heads, sequences)](
            *tensors,
            H=heads,
            BV=shapes.recur_values,
            STAGES=shapes.recur_stages,
            num_warps=shapes.recur_warps,
            enable_fp_fusion=False,
        )


def decode(
    x: Tensor,
    z: Tensor,
    b: Tensor,
    weights: KdaWeights,
    state: KdaState,
    facts: Tensor,
    shapes: Shapes | None = None,
) -> Tensor:
    """Consumes one row of each slot in `facts` (plan.decode_facts) and returns o [N, H, 128] bf16.

    Bit for bit what `prefill` returns for those rows, whatever the batch. Null slots get zeros. Reads no device memory
    on the host, so a CUDA graph may hold it. Raises ValueError for tensors that don't fit.
    """
    _check(x, z, b, state)
    count, heads = x.shape[0], state.S.shape[1]
    shapes = shapes or pinned(state.S.dtype)
    out = torch.empty((count, heads, HEAD_SIZE), dtype=torch.bfloat16, device=x.device)
    if count == 0:
        return out

    def workspace(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty((count, heads, *shape), dtype=dtype, device=x.device)

    opened, gate = state.opened, _gate(weights)
    two = gate["TWO_REFERENCES"]
    query = workspace(HEAD_SIZE)
    keys = workspace(TILE_TOKENS, HEAD_SIZE).view(count, TILE_TOKENS, heads, HEAD_SIZE) if two else opened.left
    factors = (
        workspace(TILE_TOKENS, TILE_TOKENS),
        workspace(TILE_TOKENS),
        workspace(TILE_TOKENS, HEAD_SIZE),
        workspace(HEAD_SIZE, dtype=torch.float32),
    )

    # The first kernel may begin while the one before it ends, the second one, and fetch S, while the first one ends.
    early = shapes.early and x.is_cuda
    step_kernel[(heads, count)](
        *(facts, x, z, b, weights.conv, weights.A_log, weights.dt_bias, state.conv_ring, state.conv_grid),
        *(opened.left, opened.right, opened.v, opened.beta, opened.total, opened.reference, query, keys, *factors),
        *(x.stride(0), z.stride(0), b.stride(0), weights.lower_bound or 0.0, HEAD_SIZE**-0.5),
        H=heads,
        KEYS=shapes.step_keys,
        EARLY=early,
        num_warps=shapes.step_warps,
        launch_pdl=early,
        enable_fp_fusion=False,
        **gate,
    )
    read_kernel[(HEAD_SIZE // shapes.read_values, heads, count)](
        *(facts, query, keys, opened.v, *factors, state.S, out),
        H=heads,
        BV=shapes.read_values,
        OF_SLOTS=not two,
        EARLY=early,
        num_warps=shapes.read_warps,
        maxnreg=shapes.read_registers,
        launch_pdl=early,
        enable_fp_fusion=False,
    )
    return out
