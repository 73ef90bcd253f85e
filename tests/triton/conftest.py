"""Kernels in Triton: interpreted on a CPU, compiled on a GPU. Without triton this folder's tests skip."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.support import triton_shim

if triton_shim.AVAILABLE and triton_shim.INTERPRETED:
    triton_shim.install()  # before any kernel is imported


@pytest.fixture(autouse=True)
def silent_floats() -> Iterator[None]:
    """Overflow to inf, and NaN from poison, are silent in numpy as they are on a GPU."""
    with np.errstate(all="ignore"):
        yield
