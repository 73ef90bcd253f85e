"""A server for each test."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.rpc_site import Served, served


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Served]:
    """A server with workflow `w`."""
    async with served(tmp_path / "data") as running:
        yield running
