"""A store for each backend, with nodes on it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.session_site import Running, Site


@pytest.fixture(params=["memory", "sqlite"])
async def site(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    """An empty store; its nodes are stopped at the end, and their engines must then be empty."""
    site = Site(tmp_path, request.param)
    yield site
    await site.close()


@pytest.fixture
async def memory_site(tmp_path: Path) -> AsyncIterator[Site]:
    """As `site`, in memory: where nothing depends on how the store keeps things."""
    site = Site(tmp_path, "memory")
    yield site
    await site.close()


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Site]:
    """As `site`, on disk."""
    site = Site(tmp_path, "sqlite")
    yield site
    await site.close()


@pytest.fixture
async def memory(tmp_path: Path) -> AsyncIterator[Running]:
    """One node on a store in memory, for what takes very many steps."""
    site = Site(tmp_path, "memory")
    running = await site.node()
    await running.workflow()
    yield running
    await site.close()


@pytest.fixture
async def node(site: Site) -> Running:
    """One node with an empty workflow."""
    running = await site.node()
    await running.workflow()
    return running
