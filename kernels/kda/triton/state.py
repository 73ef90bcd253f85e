"""What the KDA kernels keep in a slot and read of a layer."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from forkpoint.limits import TILE_TOKENS

HEAD_SIZE: Final = 128


@dataclass(frozen=True)
class OpenFactors:
    """The open tile's tokens as factors of its products, each row at position % 16: a fifth of S in bytes.

    With G the sum of log2 gates inside the tile: one reference (bounded gates) holds k 2^G and k 2^-G as they are; with
    two, rows 0-7 are k 2^(G + 96) and k 2^(-G - 96), rows 8-15 k 2^(G - r + 72) and k 2^(r - G - 72), r = floor(G_8).
    """

    left: Tensor
    """[slots, 16, H, 128] bf16."""
    right: Tensor
    """[slots, 16, H, 128] bf16."""
    v: Tensor
    """[slots, 16, H, 128] bf16."""
    beta: Tensor
    """[slots, 16, H] fp32."""
    total: Tensor
    """[slots, H, 128] int32: G of the newest row, in units of 2^-22."""
    reference: Tensor
    """[slots, H, 128] int32: r, once row 8 is there; 0 with one reference."""

    @staticmethod
    def empty(slots: int, heads: int, device: torch.device) -> "OpenFactors":
        """Rows of unset memory: a row is read only after it has been written."""

        def rows(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty((slots, *shape), dtype=dtype, device=device)

        wide = (TILE_TOKENS, heads, HEAD_SIZE)
        return OpenFactors(
            left=rows(*wide, dtype=torch.bfloat16),
            right=rows(*wide, dtype=torch.bfloat16),
            v=rows(*wide, dtype=torch.bfloat16),
            beta=rows(TILE_TOKENS, heads, dtype=torch.float32),
            total=rows(heads, HEAD_SIZE, dtype=torch.int32),
            reference=rows(heads, HEAD_SIZE, dtype=torch.int32),
        )


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
    """One layer's slots."""

    S: Tensor
    """[slots, H, 128, 128] fp32 or bf16: values by keys, at each slot's last grid point."""
    opened: OpenFactors
    conv_ring: Tensor
    """[slots, 4, 3 H 128] in the dtype of conv inputs."""
    conv_grid: Tensor
    """[slots, 3, 3 H 128] likewise."""
