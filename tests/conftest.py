"""Options and fixtures that every area shares. Areas that never touch torch don't import it through this file."""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from tests.long import is_long

if TYPE_CHECKING:
    import torch

LONGEST: Final = (
    "kills",
    "cli/test_demo.py",
    "crash/test_crash.py",
    "recall",
    "exactness",
    "mutations",
    "sim",
    "endtoend",
)
"""Files and folders whose tests take longest, most of them few."""
TEST_THREADS: Final = 2
"""CPU threads of a product may change its bits, so tests fix them as a server does, also for the servers they start."""

# Before anything imports torch: its OpenMP pool reads them once.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = str(TEST_THREADS)
# Tests and the servers that they start share the cores: a thread that waits must sleep, not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what runs in its background with Ctrl-C ignored, and programs hand that on to those that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--device cuda` runs the compute tests on a GPU: the same files, the same equalities."""
    parser.addoption("--device", default="cpu", help="device of the compute tests: cpu (default), cuda, cuda:1, ...")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files come first, so that no worker is left with one at the end. xdist's own order is by the number
    of tests, which puts them last: `--no-loadscope-reorder` keeps it from that."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> str:
        return item.path.relative_to(here).as_posix() if item.path.is_relative_to(here) else ""

    def rank(item: pytest.Item) -> int:
        at = f"{place(item)}/"
        return next((number for number, name in enumerate(LONGEST) if at.startswith(f"{name}/")), len(LONGEST))

    for item in items:
        if is_long(f"{place(item)}::{item.name}"):
            item.add_marker(pytest.mark.long)
    items.sort(key=rank)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> "torch.device":
    """The device that compute tests run on, from `--device`."""
    import torch

    torch.set_num_threads(TEST_THREADS)
    chosen = torch.device(request.config.getoption("--device"))
    if chosen.type == "cuda" and not torch.cuda.is_available():
        pytest.fail(f"--device {chosen}: torch sees no GPU")
    if chosen.type == "cuda":
        # Full fp32 products: TF32 would round the operands.
        torch.backends.cuda.matmul.allow_tf32 = False
    return chosen


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Put torch's thread count back after a test that changes it."""
    import torch

    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> random.Random:
    """Random numbers of the test's own, the same in every run: seeded by its name."""
    return random.Random(request.node.nodeid)
