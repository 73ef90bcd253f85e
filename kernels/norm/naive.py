"""Row norms.

A row's sum is taken over a contiguous copy and in blocks short enough that torch never splits it over threads.
"""

from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.elementwise import sigmoid

SUM_BLOCK: Final = 16384
"""Longest run of values one torch sum may take: above 32,768 a lone row is split over threads, one of many is not."""


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension: [..., D] -> [..., 1]; long rows in blocks of SUM_BLOCK, added in ascending order."""
    x = x.contiguous()
    width = x.shape[-1]
    total = x[..., :SUM_BLOCK].contiguous().sum(dim=-1, keepdim=True)
    for start in range(SUM_BLOCK, width, SUM_BLOCK):
        total = total + x[..., start : start + SUM_BLOCK].contiguous().sum(dim=-1, keepdim=True)
    return total


def _scaled(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(row_sum(x * x) / x.shape[-1] + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * (x * rsqrt(mean(x^2) + eps)): x [..., D], weight [D], fp32."""
    return _scaled(x, eps) * weight


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps): x [..., K], fp32; eps is added inside the root and to the sum, not to the mean."""
    return x * torch.rsqrt(row_sum(x * x) + eps)


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(o) * sigmoid(gate): o and gate [..., V], weight [V] shared by all heads, fp32."""
    return _scaled(o, eps) * weight * sigmoid(gate)
