"""Kernels in Triton: interpreted on a CPU, compiled on a GPU. Without triton this folder's tests skip."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

import numpy as np
import pytest
import torch

from tests.support import triton_shim

if triton_shim.AVAILABLE and triton_shim.INTERPRETED:
    triton_shim.install()  # before any kernel is imported

HERE: Final = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The interpreter reads loop bounds in a way that numpy will refuse one day (numpy < 2.4 is pinned for it)."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(
                pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
            )


@pytest.fixture(scope="session")
def kda() -> ModuleType:
    """tests.support.triton_kda: imported only where triton is."""
    if not triton_shim.AVAILABLE:
        pytest.skip(triton_shim.REASON)
    return importlib.import_module("tests.support.triton_kda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run."""
    torch.manual_seed(20261130)


@pytest.fixture(autouse=True)
def silent_floats() -> Iterator[None]:
    """Overflow to inf, and NaN from poison, are silent in numpy as they are on a GPU."""
    with np.errstate(all="ignore"):
        yield
