"""A tiny random model and engines over it."""

from collections.abc import Mapping
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.server.engine.runner import TorchEngine
from tests.support.engines import MakeEngine, random_engine
from tests.support.random_model import fitted, random_model

collect_ignore = [] if find_spec("blake3") else ["test_open.py"]
"""The engine's other tests run where nothing can be installed."""


@pytest.fixture(scope="session")
def tiny(device: torch.device) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """Config and weights of a 4-layer model, K != V on a CPU."""
    return random_model("bounded", **fitted(device, value_dim=24, heads=2), seed=9)


@pytest.fixture
def make_engine(tiny: tuple[ModelConfig, Mapping[str, Tensor]], device: torch.device) -> MakeEngine:
    """Makes engines with given pool sizes."""

    def make(slots: int = 4, pages: int = 16, sabotage: str | None = None) -> TorchEngine:
        config, weights = tiny
        # Copies: some tests damage their engine's weights.
        own = {name: tensor.clone() for name, tensor in weights.items()}
        return random_engine(config, own, device, slots=slots, pages=pages, sabotage=sabotage)

    return make


@pytest.fixture
def engine(make_engine: MakeEngine) -> TorchEngine:
    """Four slots, sixteen pages."""
    return make_engine()
