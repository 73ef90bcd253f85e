"""The experts in plain torch: one expert at a time, its rows in blocks of fixed shape, sums in ascending expert id."""

import torch
from torch import Tensor

from forkpoint.kernels.experts.mxfp4 import unpack
from forkpoint.kernels.experts.weights import ExpertMatrix, Experts
from forkpoint.kernels.ffn.activation import Activation
from forkpoint.kernels.ffn.naive import glu
from forkpoint.kernels.matmul.naive import linear
from forkpoint.kernels.router.routes import Routes


def matrix(weights: ExpertMatrix, expert: int) -> Tensor:
    """The matrix [N, K] of one expert, in the dtype of dense values, or fp32."""
    values = weights.values[expert]
    return values if weights.scales is None else unpack(values, weights.scales[expert])


def experts_sum(x: Tensor, routes: Routes, weights: Experts, activation: Activation, shared: Tensor | None) -> Tensor:
    """Σ weight · expert(x) over each row's experts, plus its row of `shared`: x [R, D] -> [R, D].

    The weight is multiplied after the down projection.
    """
    rows, width = x.shape
    per_token = routes.experts.shape[1]
    outputs = x.new_empty((rows, per_token, width))
    for expert in torch.unique(routes.experts).tolist():
        row, slot = torch.nonzero(routes.experts == expert, as_tuple=True)
        gate, up = linear(x[row], matrix(weights.gate_up, expert).to(x.dtype)).chunk(2, dim=1)
        down = matrix(weights.down, expert).to(x.dtype)
        outputs[row, slot] = linear(glu(gate, up, activation), down)
    share = routes.weights.to(x.dtype)
    total = share[:, :1] * outputs[:, 0]
    for place in range(1, per_token):
        total = total + share[:, place : place + 1] * outputs[:, place]
    return total if shared is None else total + shared
