"""Fixtures: an open catalog and a blob store of every backend, and ways to open the same store again."""

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from forkpoint.statestore.base import BlobStore, Catalog
from tests.conformance.backends import Backend, backends
from tests.support.store import MARKER, ManualClock

CATALOGS = [backend for backend in backends() if backend.catalog]
BLOBS = [backend for backend in backends() if backend.blobs]
OpenCatalog = Callable[[], Awaitable[Catalog]]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=CATALOGS, ids=lambda backend: backend.label)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
async def unopened(backend: Backend, tmp_path: Path, clock: ManualClock) -> AsyncIterator[Callable[[], Catalog]]:
    """Makes catalogs over one place, not yet opened; closes them all."""
    assert backend.catalog is not None
    made: list[Catalog] = []
    factory = backend.catalog

    def make() -> Catalog:
        made.append(factory(tmp_path, clock))
        return made[-1]

    yield make
    for catalog in made:
        await catalog.close()


@pytest.fixture
async def catalog(unopened: Callable[[], Catalog]) -> Catalog:
    opened = unopened()
    await opened.open(MARKER)
    return opened


@pytest.fixture
def another(backend: Backend, catalog: Catalog, unopened: Callable[[], Catalog]) -> OpenCatalog:
    """Opens the store of `catalog` once more, as another process would."""
    if not backend.persistent:
        pytest.skip(f"{backend.label} has nothing to open again")

    async def make() -> Catalog:
        opened = unopened()
        await opened.open(MARKER)
        return opened

    return make


@pytest.fixture(params=BLOBS, ids=lambda backend: backend.label)
def blob_backend(request: pytest.FixtureRequest) -> Backend:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
async def blobs(blob_backend: Backend, tmp_path: Path) -> AsyncIterator[BlobStore]:
    assert blob_backend.blobs is not None
    opened = blob_backend.blobs(tmp_path)
    yield opened
    await opened.close()
