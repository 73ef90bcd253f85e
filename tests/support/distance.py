"""How far logits are from those of another implementation or another precision."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from tests.support.model_runs import logits_tolerance

BF16_NOISE: Final = 4.0
"""Of a model with experts on a GPU."""


@dataclass(frozen=True)
class Distance:
    """Largest difference of a token's logits, of the median and the worst token, over the largest logit of all."""

    median: float
    worst: float

    def within(self, config: ModelConfig, device: torch.device, noise: float = 1.0, given_routes: bool = False) -> bool:
        """Whether the median token is as near as the device's precision lets it be, and the worst within `noise` times
        as much.

        Rounding to bf16 sends a token that is near a tie to another expert, and then it may be anything. So on a GPU
        the worst token of a model with experts counts only when the other one was given the same routes.
        """
        tolerance = logits_tolerance(device)
        if device.type == "cuda" and config.moe is not None:
            noise = BF16_NOISE if given_routes else float("inf")
        return self.median <= tolerance and self.worst <= noise * tolerance

    def __str__(self) -> str:
        return f"median {self.median:.1e}, worst {self.worst:.1e}"


def distance(logits: Tensor, expected: Tensor) -> Distance:
    """Of logits [T, vocab] from the expected ones; not a number counts as infinitely far."""
    error = (logits.double().cpu() - expected.double()).abs().nan_to_num(torch.inf).amax(1) / expected.abs().max()
    return Distance(float(error.median()), float(error.max()))
