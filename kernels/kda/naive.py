"""Kimi Delta Attention: the gate and the recurrence, as defined (arXiv 2510.26692; bounded gate: Kimi K3).

Per head, with S [V, K] and for each token in this order: S *= decay (per key channel), u = beta (v - S k), S += u k^T,
o = S q. tile.py computes the same 16 tokens at a time, in the form whose bits are the product's.
"""

import math
from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.elementwise import GATE_ONE, LOG2_E, sigmoid, softplus
from forkpoint.kernels.kda.tile import OpenRows, tile_kda

__all__ = ["GATE_FLOOR", "OpenRows", "kda_gate", "recurrent_kda", "tile_kda"]

GATE_FLOOR: Final = -24.0
"""Lowest log2 gate of one token: 2^-24 is fp32's own resolution, and two references a tile carry no more."""


def recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of one sequence, token by token: the definition, in the dtype of its inputs.

    q, k [T, H, K] normalised (q scaled as well), v [T, H, V], log_decay [T, H, K] natural logarithm, beta [T, H],
    initial_state [H, V, K]. Returns o [T, H, V] and the final state [H, V, K]; changes no argument.
    """
    state = initial_state.clone()
    outputs = torch.empty_like(v)
    for t in range(q.shape[0]):
        state = state * log_decay[t].exp()[:, None, :]
        u = beta[t][:, None] * (v[t] - (state @ k[t][:, :, None])[:, :, 0])
        state = state + u[:, :, None] * k[t][:, None, :]
        outputs[t] = (state @ q[t][:, :, None])[:, :, 0]
    return outputs, state


def kda_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log2 decay of each token, head and key channel: int32 [R, H, K] in units of 2^-22, all <= 0.

    z [R, H, K], A_log [H], dt_bias [H, K], fp32. Without a bound: -exp(A_log) softplus(z + dt_bias), floored at
    2^-24 a token; with one: lower_bound * sigmoid(exp(A_log) (z + dt_bias)), natural logarithm, lower_bound < 0.
    Raises ValueError for a bound that a tile cannot hold.
    """
    shifted = z + dt_bias
    rate = A_log.exp()[:, None]
    if lower_bound is None:
        log2_gate = (softplus(shifted) * (rate * -LOG2_E)).clamp(min=GATE_FLOOR)
    else:
        if not 0.0 < -lower_bound * LOG2_E <= -GATE_FLOOR:
            raise ValueError(f"lower_bound must lie in [{GATE_FLOOR * math.log(2.0):.2f}, 0), got {lower_bound}")
        log2_gate = sigmoid(shifted * rate) * (lower_bound * LOG2_E)
    return (log2_gate * GATE_ONE).add_(0.5).floor_().to(torch.int32)
