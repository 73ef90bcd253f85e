"""Backends by URL: memory://, sqlite:///path, file:///path, redis://host (statestore/redis/url.py)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol, runtime_checkable
from urllib.parse import unquote, urlsplit

from forkpoint.clock import Clock
from forkpoint.errors import ConfigError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import SCHEMA_VERSION, StoreMarker
from forkpoint.statestore.redis.url import SCHEMES, parse_redis_url
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from forkpoint.statestore.sqlite.marker import read_marker as read_sqlite_marker
from forkpoint.statestore.stack import DEFAULT_NAMESPACE, open_stack, parse_blobs
from forkpoint.statestore.tiers import BlobSource


@runtime_checkable
class ExplainsDurability(Protocol):
    """A catalog whose class depends on how its servers are set."""

    @property
    def durability_reason(self) -> str:
        """Why it reaches no more. Known once it is open."""
        ...


def open_catalog(url: str, clock: Clock | None = None) -> Catalog:
    """The catalog of a URL; `await catalog.open(marker)` comes next. Raises ConfigError."""
    scheme = _scheme(url)
    if scheme == "memory":
        return MemoryCatalog(clock)
    if scheme == "sqlite":
        return SqliteCatalog(_path("catalog", url), clock)
    if scheme in SCHEMES:
        # Late: redis-py takes longer to import than all the rest, and most commands never need it.
        from forkpoint.statestore.redis.catalog import RedisCatalog

        return RedisCatalog(parse_redis_url("catalog", url), clock)
    known = "sqlite:///path, redis://host, valkey://host or memory://"
    raise ConfigError("catalog", shown_url(url), f"no such catalog: {scheme!r}; use {known}")


def open_blobs(setting: str, namespace: str = DEFAULT_NAMESPACE, sources: Sequence[BlobSource] = ()) -> BlobStore:
    """The blob store of a URL, or the tiers of several (statestore/stack.py), folders made when missing;
    `await blobs.open()` comes next. `namespace`: the catalog's, for places that many share. `sources`: asked for what
    no tier has. Raises ConfigError, StoreUnavailableError."""
    return open_stack(setting, sources, namespace=namespace)


def blob_folders(setting: str) -> list[Path]:
    """Where the blobs of a setting lie as files. Raises ConfigError."""
    return [url.folder for url in parse_blobs(setting) if url.folder is not None]


def read_marker(url: str) -> StoreMarker | None:
    """What the store in the file of a catalog URL was made for, None when there is none yet. For tools without a model:
    opening it with this marker brings a store of an older version up to this one."""
    if _scheme(url) != "sqlite":
        return None
    return _as_opened(read_sqlite_marker(_path("catalog", url)))


async def find_marker(url: str) -> StoreMarker | None:
    """As read_marker, also of a store on a server: of the namespace that its URL names. Raises ConfigError,
    StoreUnavailableError."""
    if _scheme(url) in SCHEMES:
        from forkpoint.statestore.redis.marker import read_marker as read_redis_marker

        return _as_opened(await read_redis_marker(parse_redis_url("catalog", url)))
    return read_marker(url)


def _as_opened(stored: StoreMarker | None) -> StoreMarker | None:
    if stored is None or stored.schema_version > SCHEMA_VERSION:
        return stored
    return replace(stored, schema_version=SCHEMA_VERSION)


def shown_url(url: str) -> str:
    """A store's URL as errors and logs may show it: without user and password, and without options."""
    scheme, separator, rest = url.partition("?")[0].partition("#")[0].partition("://")
    authority, slash, path = rest.partition("/")
    return f"{scheme}{separator}{authority.rpartition('@')[2]}{slash}{path}"


def _scheme(url: str) -> str:
    return url.partition(":")[0]


def _path(key: str, url: str) -> Path:
    parts = urlsplit(url)
    path = Path(unquote(parts.path))
    if parts.netloc or parts.query or parts.fragment or not path.is_absolute() or path == Path("/"):
        raise ConfigError(key, shown_url(url), f"expected {parts.scheme}:///absolute/path")
    return path
