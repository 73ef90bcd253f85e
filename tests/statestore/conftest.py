"""Fixtures that the store's tests share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.support.collecting import Yard
from tests.support.store import MARKER, ManualClock


@pytest.fixture(params=["memory", "files"])
async def yard(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Yard]:
    clock = ManualClock()
    catalog: Catalog = MemoryCatalog(clock)
    blobs: BlobStore = MemoryBlobs()
    if request.param == "files":
        catalog = SqliteCatalog(tmp_path / "catalog.sqlite", clock, synchronous="OFF")
        blobs = FileBlobs(tmp_path / "blobs")
    await catalog.open(MARKER)
    await blobs.open()
    yield Yard(catalog, blobs, clock)
    await catalog.close()
    await blobs.close()
