"""L and M of a tile: decays 2^(G_i - G_j) split over the two factors of a product, around a causal reference.

A factor 2^-G alone overflows, and the reference of row i may depend on rows <= i only, else a decode step could not
form what a prefill formed. Entries above the diagonal may be inf or NaN: `where` drops them, and entries of a
product do not mix. Two forms, by the gate:

- one reference, when 16 gates span at most 124 binades (Kimi K3: -5 natural = 115.4): k 2^(G + c) and k 2^(-G - c), c
  half the span;
- two references, for gates down to -24 a token: rows 0-7 refer to the constant -96, rows 8-15 to r = floor(G_8), each
  channel its own: k 2^(G - r + 72) and k 2^(r - G - 72). Keys more than 54 binades above r vanish, as they would
  anyway.
"""

import math
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.elementwise import GATE_BITS, LOG2_E, pow2_fixed
from forkpoint.kernels.matmul.naive import bmm_fixed
from forkpoint.limits import TILE_TOKENS

HALF: Final = TILE_TOKENS // 2
ONE_REFERENCE_BINADES: Final = 124.0
"""Largest span of a tile's decays for one reference."""
FIRST_SHIFT: Final = 96
SECOND_SHIFT: Final = 72


@lru_cache(maxsize=8)
def _masks(device: torch.device) -> tuple[Tensor, Tensor]:
    """[32, 16] which entries of (L over M) exist, and [16, 1] which rows take the first reference."""
    row = torch.arange(TILE_TOKENS, device=device)
    below, upto = row[:, None] > row, row[:, None] >= row
    return torch.cat((below, upto)), (row < HALF)[:, None]


def _one_reference(kq: Tensor, k: Tensor, total: Tensor, span: float) -> Tensor:
    shift = math.ceil(span / 2)
    rows = pow2_fixed(total, shift)
    left = (kq.view(-1, 2, TILE_TOKENS, kq.shape[-1]) * rows[:, None]).view(kq.shape)
    return bmm_fixed(left, (k * pow2_fixed(-total, -shift)).transpose(1, 2))


def _two_references(kq: Tensor, k: Tensor, total: Tensor) -> Tensor:
    _, first = _masks(k.device)
    reference = total[:, HALF : HALF + 1] >> GATE_BITS
    shifts = torch.where(first, FIRST_SHIFT, SECOND_SHIFT - reference)
    left = (kq.view(-1, 2, TILE_TOKENS, kq.shape[-1]) * pow2_fixed(total, shifts)[:, None]).view(kq.shape)
    # Keys of rows 8-15 may be inf here; only rows 0-7 read these columns, and for those they lie above the diagonal.
    early = k * pow2_fixed(-total, -FIRST_SHIFT)
    late = k * pow2_fixed(-total, reference - SECOND_SHIFT)
    both = bmm_fixed(left, torch.cat((early, late), dim=1).transpose(1, 2))
    return torch.where(first.repeat(2, 1), both[..., :TILE_TOKENS], both[..., TILE_TOKENS:])


def masked_products(kq: Tensor, k: Tensor, total: Tensor, lower_bound: float | None) -> tuple[Tensor, Tensor]:
    """Strictly lower L and lower M, each [B, 16, 16].

    kq [B, 32, K]: k above q; k [B, 16, K]; total [B, 16, K]: int32 inclusive sums G of the tile's log2 gates.
    """
    span = math.inf if lower_bound is None else -lower_bound * LOG2_E * TILE_TOKENS
    both = _one_reference(kq, k, total, span) if span <= ONE_REFERENCE_BINADES else _two_references(kq, k, total)
    exists, _ = _masks(k.device)
    both = torch.where(exists, both, 0.0)
    return both[:, :TILE_TOKENS], both[:, TILE_TOKENS:].contiguous()
