"""Backends by URL: memory://, sqlite:///absolute/path, file:///absolute/path."""

from dataclasses import replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from forkpoint.clock import Clock
from forkpoint.errors import ConfigError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import SCHEMA_VERSION, StoreMarker
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from forkpoint.statestore.sqlite.marker import read_marker as read_sqlite_marker


def open_catalog(url: str, clock: Clock | None = None) -> Catalog:
    """The catalog of a URL; `await catalog.open(marker)` comes next. Raises ConfigError."""
    scheme = _scheme("catalog", url)
    if scheme == "memory":
        return MemoryCatalog(clock)
    if scheme == "sqlite":
        return SqliteCatalog(_path("catalog", url), clock)
    raise ConfigError("catalog", url, f"no such catalog: {scheme!r}; use sqlite:///path or memory://")


def open_blobs(url: str) -> BlobStore:
    """The blob store of a URL, its folder made when missing. Raises ConfigError, StoreUnavailableError."""
    scheme = _scheme("blobs", url)
    if scheme == "memory":
        return MemoryBlobs()
    if scheme == "file":
        return FileBlobs(_path("blobs", url))
    raise ConfigError("blobs", url, f"no such blob store: {scheme!r}; use file:///path or memory://")


def read_marker(url: str) -> StoreMarker | None:
    """What the store of a catalog URL was made for, None when there is none yet. For tools without a model: opening it
    with this marker brings a store of an older version up to this one."""
    if _scheme("catalog", url) != "sqlite":
        return None
    stored = read_sqlite_marker(_path("catalog", url))
    if stored is None or stored.schema_version > SCHEMA_VERSION:
        return stored
    return replace(stored, schema_version=SCHEMA_VERSION)


def _scheme(key: str, url: str) -> str:
    scheme = urlsplit(url).scheme
    if scheme in ("redis", "rediss", "valkey"):
        raise ConfigError(key, url, f"{scheme}:// is not built yet")
    return scheme


def _path(key: str, url: str) -> Path:
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc or parts.query or parts.fragment or not path.is_absolute() or path == Path("/"):
        raise ConfigError(key, url, f"expected {parts.scheme}:///absolute/path")
    return path
