"""The models of the exactness suite. They and their quiet reference runs live as long as the suite."""

from functools import cache

import pytest
import torch

from tests.support.lab import Model
from tests.support.random_model import Kind, fitted, random_model

KINDS: dict[str, Kind] = {
    "kimi-linear": "kimi-linear",
    "k3-uneven": "k3",
    "bounded-wide": "bounded",
    "softplus-wide": "softplus",
}


@cache
def build(name: str, device: torch.device) -> Model:
    """`uneven`: K != V (on a GPU: three heads instead of two). `wide`: the published head size."""
    sizes = {"key_dim": 128} if name.endswith("-wide") else {"value_dim": 24 if name.endswith("-uneven") else None}
    config, weights = random_model(KINDS[name], **fitted(device, **sizes), seed=5)
    return Model(config, weights, device)


@pytest.fixture(params=["kimi-linear", "k3-uneven"])
def model(request: pytest.FixtureRequest, device: torch.device) -> Model:
    """Both architectures with all that they have, small: KDA with a dense block, KDA, KDA, MLA; K3 in two blocks."""
    return build(request.param, device)


@pytest.fixture(params=["bounded-wide", "softplus-wide"])
def wide_model(request: pytest.FixtureRequest, device: torch.device) -> Model:
    """K = V = 128, as published, with both gates; dense blocks."""
    return build(request.param, device)
