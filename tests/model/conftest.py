"""Exact mode on a CPU holds for a fixed number of threads, so tests fix it too."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def two_threads() -> None:
    torch.set_num_threads(2)
