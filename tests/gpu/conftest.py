"""The compiled kernels on a GPU, at sizes that an interpreter can't do. Without a GPU this folder's tests skip."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch

from tests.support.gpu import poison_free_memory

HERE: Final = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device(device: torch.device) -> torch.device:
    """`--device cuda:N`, or the first GPU."""
    return device if device.type == "cuda" else torch.device("cuda")


@pytest.fixture(autouse=True)
def poisoned(device: torch.device) -> Iterator[None]:
    """The same random numbers in every run, NaN in all memory that torch gives out; all of it goes back afterwards."""
    torch.manual_seed(20261130)
    poison_free_memory(device)
    yield
    torch.cuda.empty_cache()
