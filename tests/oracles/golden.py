"""Golden logits: what other implementations computed of the oracle models, and how near is near enough.

Written by `python -m tests.oracles --write`, read by every run of the tests.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tests.support.model_runs import FP32_TOLERANCE

FOLDER: Final = Path(__file__).parents[1] / "golden" / "logits"
ORACLES: Final = (("kimi-linear", "transformers"), ("kimi-linear", "mlx-lm"), ("k3", "mlx-lm"))
"""Model and implementation. transformers has no K3: it takes K3's text config and ignores most of it."""
NOISE: Final = 10.0
"""In K3 a few tokens are this much more sensitive to fp32's rounding than the median one, in every implementation."""


@dataclass(frozen=True)
class Golden:
    """logits [T, vocab] fp32 that `implementation` (a name and a version) computed of the weights with this digest."""

    implementation: str
    digest: str
    token_ids: list[int]
    logits: Tensor

    @classmethod
    def read(cls, model: str, oracle: str) -> Self:
        with safe_open(FOLDER / f"{model}.{oracle}.safetensors", framework="pt") as file:
            about, ids = file.metadata(), file.get_tensor("token_ids").tolist()
            return cls(about["implementation"], about["weights"], ids, file.get_tensor("logits"))

    def write(self, model: str, oracle: str) -> None:
        FOLDER.mkdir(exist_ok=True)
        tensors = {"token_ids": torch.tensor(self.token_ids, dtype=torch.int32), "logits": self.logits.contiguous()}
        about = {"implementation": self.implementation, "weights": self.digest}
        save_file(tensors, FOLDER / f"{model}.{oracle}.safetensors", about)


@dataclass(frozen=True)
class Distance:
    """Largest difference of a token's logits, of the median and the worst token, over the largest logit of all."""

    median: float
    worst: float

    def within(self, tolerance: float = FP32_TOLERANCE, noise: float = NOISE) -> bool:
        """Whether the median token is within the tolerance, and the worst within `noise` times as much."""
        return self.median <= tolerance and self.worst <= noise * tolerance

    def __str__(self) -> str:
        return f"median {self.median:.1e}, worst {self.worst:.1e}"


def distance(logits: Tensor, expected: Tensor) -> Distance:
    """Of logits [T, vocab] from the expected ones; not a number counts as infinitely far."""
    error = (logits.double() - expected.double()).abs().nan_to_num(torch.inf).amax(1) / expected.abs().max()
    return Distance(float(error.median()), float(error.max()))
