"""What a router reads and what it says."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Router:
    """The gate of one layer: weight [E, hidden], bias [E] fp32 (`e_score_correction_bias`), and its constants."""

    weight: Tensor
    bias: Tensor
    per_token: int
    """Experts a row goes to."""
    renormalize: bool
    """Weights of a row are divided by their sum (not with one expert a token)."""
    scaling_factor: float
    biased_weights: bool = False
    """Weights from the biased scores, as Kimi Linear's first published code had it, instead of the scores."""


@dataclass(frozen=True, slots=True)
class Routes:
    """experts [R, k] int64, ascending in every row, and weights [R, k] fp32 in the same order."""

    experts: Tensor
    weights: Tensor
