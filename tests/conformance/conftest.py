"""Fixtures: an open catalog and a blob store of every backend, and ways to open the same store again."""

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from tests.conformance.backends import Backend, backends
from tests.support.store import MARKER, ManualClock


def _parameter(backend: Backend) -> object:
    skips = [pytest.mark.skip(reason=backend.missing)] if backend.missing else []
    return pytest.param(backend, id=backend.label, marks=skips)


CATALOGS = [_parameter(backend) for backend in backends() if backend.catalog]
BLOBS = [_parameter(backend) for backend in backends() if backend.blobs]
OpenCatalog = Callable[[], Awaitable[Catalog]]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture(params=CATALOGS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where stores lie: in memory when there is such a place. This suite is about meaning, not about disks."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as path:
        yield Path(path)


@pytest.fixture
async def unopened(backend: Backend, folder: Path, clock: ManualClock) -> AsyncIterator[Callable[[], Catalog]]:
    """Makes catalogs over one place, not yet opened; closes them all."""
    assert backend.catalog is not None
    made: list[Catalog] = []
    factory = backend.catalog

    def make() -> Catalog:
        made.append(factory(folder, clock))
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
def another(catalog: Catalog, unopened: Callable[[], Catalog]) -> OpenCatalog:
    """Opens the store of `catalog` once more, as another process would."""

    async def make() -> Catalog:
        opened = unopened()
        await opened.open(MARKER)
        return opened

    return make


@pytest.fixture(params=BLOBS)
def blob_backend(request: pytest.FixtureRequest) -> Backend:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
async def blobs(blob_backend: Backend, folder: Path) -> AsyncIterator[BlobStore]:
    assert blob_backend.blobs is not None
    opened = blob_backend.blobs(folder)
    await opened.open()
    yield opened
    await opened.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that open a store twice are not for backends that live and die with one object."""
    useless = [item for item in items if "another" in getattr(item, "fixturenames", ()) and not _persistent(item)]
    if useless:
        config.hook.pytest_deselected(items=useless)
        items[:] = [item for item in items if item not in useless]


def _persistent(item: pytest.Item) -> bool:
    callspec = getattr(item, "callspec", None)
    return callspec is None or callspec.params["backend"].persistent
