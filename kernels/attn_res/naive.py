"""The mixture of Attention Residuals in plain torch, fp32: each row by itself, sources in ascending order."""

import torch
from torch import Tensor

from forkpoint.kernels.norm.naive import row_sum


def mix(bank: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """softmax-weighted sum of the raw sources bank [n, R, D] and x [R, D]: [R, D], n >= 1.

    A source's score is the sum of its RMS-normed row times weight [D], which is γ ⊙ p of the published norm and
    projection, without a temperature. Source: `mix` in the published K3 model (arXiv 2607.24653).
    """
    sources = [*bank.unbind(0), x]
    scores = [row_sum(source * torch.rsqrt(row_sum(source * source) / x.shape[1] + eps) * weight) for source in sources]
    largest = scores[0]
    for score in scores[1:]:
        largest = torch.maximum(largest, score)
    shares = [torch.exp(score - largest) for score in scores]
    total, mixed = shares[0], shares[0] * sources[0]
    for share, source in zip(shares[1:], sources[1:], strict=True):
        total, mixed = total + share, mixed + share * source
    return mixed / total
