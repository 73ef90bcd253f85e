"""Which KDA layers and tensors the Triton kernels take; imports no triton, so that a machine without it can ask."""

import importlib.util
from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.elementwise import LOG2_E
from forkpoint.kernels.kda.naive import GATE_FLOOR
from forkpoint.kernels.kda.references import ONE_REFERENCE_BINADES
from forkpoint.kernels.kda.triton.state import HEAD_SIZE
from forkpoint.limits import TILE_TOKENS

POOL_DTYPES: Final = (torch.float32, torch.bfloat16)
INT32_MAX: Final = 2**31 - 1


def needs_two_references(lower_bound: float | None) -> bool:
    """Whether a tile's decays may span more binades than one reference holds (references.py)."""
    return lower_bound is None or -lower_bound * LOG2_E * TILE_TOKENS > ONE_REFERENCE_BINADES


def why_not(
    key_size: int, value_size: int, lower_bound: float | None, pool: torch.dtype, capability: tuple[int, int]
) -> str | None:
    """Why a layer's shapes don't suit these kernels, in words that end up in a log, or None where they do.

    `capability` is the device's compute capability; pool the dtype of S.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if capability < (9, 0):
        return f"compute capability {capability[0]}.{capability[1]}: bits were only compared from 9.0 on"
    if (key_size, value_size) != (HEAD_SIZE, HEAD_SIZE):
        return f"keys of {key_size} and values of {value_size} channels: only {HEAD_SIZE} and {HEAD_SIZE} are fast"
    if lower_bound is not None and not 0.0 < -lower_bound * LOG2_E <= -GATE_FLOOR:
        return f"a gate bounded at {lower_bound} does not fit a tile"
    if pool not in POOL_DTYPES:
        return f"a pool of {pool}: only {', '.join(str(dtype) for dtype in POOL_DTYPES)}"
    return None


def check_rows(x: Tensor, z: Tensor, b: Tensor, heads: int) -> None:
    """Raises ValueError unless x [R, 3 H 128], z [R, H 128] and b [R, H] have contiguous rows and fitting shapes."""
    width = heads * HEAD_SIZE
    for name, tensor, columns in (("x", x, 3 * width), ("z", z, width), ("b", b, heads)):
        if tensor.ndim != 2 or tensor.shape != (x.shape[0], columns) or (columns > 1 and tensor.stride(1) != 1):
            raise ValueError(
                f"{name} must be [{x.shape[0]}, {columns}] with contiguous rows, got {tuple(tensor.shape)}"
            )


def check_pool(S: Tensor, others: dict[str, Tensor], x: Tensor) -> None:
    """Raises ValueError unless S [slots, H, 128, 128] and the slots' other tensors are contiguous and agree with x."""
    slots, heads = S.shape[:2]
    if S.shape[2:] != (HEAD_SIZE, HEAD_SIZE) or S.dtype not in POOL_DTYPES:
        raise ValueError(f"S must be [slots, H, {HEAD_SIZE}, {HEAD_SIZE}], got {tuple(S.shape)} {S.dtype}")
    for name, tensor in {"S": S, **others}.items():
        if not tensor.is_contiguous() or tensor.shape[0] != slots:
            raise ValueError(f"{name} must be contiguous with {slots} slots, got {tuple(tensor.shape)}")
    for name in ("conv_ring", "conv_grid"):
        if others[name].dtype != x.dtype or others[name].shape[2] != 3 * heads * HEAD_SIZE:
            raise ValueError(f"{name} must hold x's dtype {x.dtype} and channels, got {others[name].dtype}")
