"""The models of the exactness suite. They and their quiet reference runs live as long as the suite."""

from functools import cache

import pytest
import torch

from tests.support.lab import Model
from tests.support.random_model import random_model


@cache
def build(name: str, device: torch.device) -> Model:
    """Both gates, K = V and K != V; `wide` has the published head size."""
    if name == "bounded":
        config, weights = random_model("bounded", seed=1)
    elif name == "bounded-k16-v24":
        config, weights = random_model("bounded", value_dim=24, seed=2)
    elif name == "softplus":
        config, weights = random_model("softplus", seed=3)
    elif name == "softplus-k16-v24":
        config, weights = random_model("softplus", value_dim=24, seed=4)
    else:
        config, weights = random_model("softplus" if "softplus" in name else "bounded", key_dim=128, seed=5)
    return Model(config, weights, device)


@pytest.fixture(params=["bounded", "bounded-k16-v24", "softplus", "softplus-k16-v24"])
def model(request: pytest.FixtureRequest, device: torch.device) -> Model:
    """Each of four small random models, 4 layers: KDA, KDA, KDA, MLA."""
    return build(request.param, device)


@pytest.fixture(params=["bounded-wide", "softplus-wide"])
def wide_model(request: pytest.FixtureRequest, device: torch.device) -> Model:
    """Models with K = V = 128, as published."""
    return build(request.param, device)
