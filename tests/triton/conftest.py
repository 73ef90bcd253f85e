"""Runs the Triton kernels interpreted on a CPU, or on a GPU with `--device cuda`: the same tests, tiny shapes."""

import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch

SWITCH = "TRITON_INTERPRET"


@pytest.fixture(scope="session")
def kda(device: torch.device) -> Iterator[ModuleType]:
    """tests.support.triton_kda, with kernels that run on `device`."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton==3.6.0 (640 MB, so not among the test packages)")
    if device.type == "cuda":
        yield importlib.import_module("tests.support.triton_kda")
        return
    if "triton" in sys.modules and os.environ.get(SWITCH) != "1":
        pytest.skip(f"something imported triton without {SWITCH}=1: run `{SWITCH}=1 pytest tests/triton`")
    before = os.environ.get(SWITCH)
    os.environ[SWITCH] = "1"
    importlib.import_module("tests.support.triton_shim").install()
    yield importlib.import_module("tests.support.triton_kda")
    if before is None:
        del os.environ[SWITCH]


@pytest.fixture(autouse=True)
def seed_and_quiet_interpreter() -> Iterator[None]:
    """Masked entries of a tile may be inf or NaN (tile_ops.py), and numpy would warn about each; the interpreter turns
    one-element arrays into loop bounds, which numpy deprecates."""
    torch.manual_seed(20261130)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Conversion of an array with ndim > 0", DeprecationWarning)
        yield
