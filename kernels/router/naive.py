"""Routing in plain torch: scores by row, ties to the lower expert id."""

from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.elementwise import sigmoid
from forkpoint.kernels.matmul.naive import linear
from forkpoint.kernels.router.routes import Router, Routes

SUM_EPS: Final = 1e-20
"""Added to a row's sum of weights before the division, as published."""


def choose(logits: Tensor, router: Router) -> Routes:
    """Routes of rows by their logits [R, E] fp32: sigmoid scores, chosen by score + bias, weighted by score alone."""
    scores = sigmoid(logits)
    biased = scores + router.bias
    # A stable sort gives the lower id first where choices are equal.
    ranked = torch.sort(biased, dim=1, descending=True, stable=True).indices[:, : router.per_token]
    experts = torch.sort(ranked, dim=1).values
    weights = (biased if router.biased_weights else scores).gather(1, experts)
    if router.renormalize and router.per_token > 1:
        total = weights[:, 0]
        for column in range(1, router.per_token):
            total = total + weights[:, column]
        weights = weights / (total + SUM_EPS)[:, None]
    return Routes(experts, weights * router.scaling_factor)


def route(x: Tensor, router: Router) -> Routes:
    """Routes of rows x [R, hidden] fp32."""
    return choose(linear(x, router.weight), router)
