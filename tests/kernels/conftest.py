"""Fixtures for kernel tests: two threads, as the product runs on a CPU, and a seed."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def two_threads_and_a_seed() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(20261130)
    yield
    torch.set_num_threads(before)
