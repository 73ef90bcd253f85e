"""Kernels in Triton: interpreted on a CPU, compiled on a GPU. Without triton this folder's tests skip."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import pytest

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


@pytest.fixture(autouse=True)
def silent_floats() -> Iterator[None]:
    """Overflow to inf, and NaN from poison, are silent in numpy as they are on a GPU."""
    with np.errstate(all="ignore"):
        yield
