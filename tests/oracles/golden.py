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

from tests.oracles.models import oracle_model
from tests.support.distance import Distance

FOLDER: Final = Path(__file__).parents[1] / "golden" / "logits"
ORACLES: Final = (("kimi-linear", "transformers"), ("kimi-linear", "mlx-lm"), ("k3", "mlx-lm"))
"""Model and implementation. transformers has no K3: it takes K3's text config and ignores most of it."""
NOISE: Final = {"kimi-linear": 1.0, "k3": 10.0}
"""How much farther off than the median token the worst may be. In K3 a few tokens are so much more sensitive to fp32's
rounding, in every implementation."""


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


def agrees(name: str, far: Distance, device: torch.device | str = "cpu") -> bool:
    """Whether logits of an oracle model that `device` computed are near enough to be the same model's."""
    return far.within(oracle_model(name).config, torch.device(device), NOISE[name])
