"""The models of the exactness suite. They and their quiet reference runs live as long as the suite."""

from functools import cache

import pytest
import torch

from tests.support.lab import Model
from tests.support.random_model import Kind, fitted, random_model

SEEDS = {"bounded": 1, "bounded-uneven": 2, "softplus": 3, "softplus-uneven": 4}


@cache
def build(name: str, device: torch.device) -> Model:
    """Both gates, K = V and K != V (on a GPU: two heads and three); `wide` has the published head size."""
    kind: Kind = "softplus" if "softplus" in name else "bounded"
    if name.endswith("-wide"):
        config, weights = random_model(kind, **fitted(device, key_dim=128), seed=5)
    else:
        value_dim = 24 if name.endswith("-uneven") else None
        config, weights = random_model(kind, **fitted(device, value_dim=value_dim), seed=SEEDS[name])
    return Model(config, weights, device)


@pytest.fixture(params=["bounded", "bounded-uneven", "softplus", "softplus-uneven"])
def model(request: pytest.FixtureRequest, device: torch.device) -> Model:
    """Each of four small random models, 4 layers: KDA, KDA, KDA, MLA."""
    return build(request.param, device)


@pytest.fixture(params=["bounded-wide", "softplus-wide"])
def wide_model(request: pytest.FixtureRequest, device: torch.device) -> Model:
    """Models with K = V = 128, as published."""
    return build(request.param, device)
