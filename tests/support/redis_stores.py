"""Stores on the shared test servers: each folder is a store of its own, the one before it is cleared away."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from forkpoint.clock import Clock
from forkpoint.statestore.redis.blobheader import CHUNK_BYTES_LEAST
from forkpoint.statestore.redis.blobs import RedisBlobs
from forkpoint.statestore.redis.catalog import RedisCatalog
from forkpoint.statestore.redis.url import parse_redis_url
from tests.support.redis_servers import PRODUCTS, binary, shared_cluster, shared_server
from tests.support.store import MARKER

DURABLE: Final = ("--appendonly", "yes", "--appendfsync", "always")
"""Options of a server that reaches LOCAL_FSYNC."""
_LAST: dict[str, Path] = {}


def products() -> list[Any]:
    """Every product as a test's parameter, skipped with a reason where it is not installed."""
    missing = [pytest.mark.skipif(binary(product) is None, reason=f"no {product} server here") for product in PRODUCTS]
    return [pytest.param(product, marks=mark) for product, mark in zip(PRODUCTS, missing, strict=True)]


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[RedisCatalog]:
    """An open catalog."""
    catalog = RedisCatalog(parse_redis_url("catalog", url))
    try:
        await catalog.open(MARKER)
        yield catalog
    finally:
        await catalog.close()


def store_url(label: str, folder: Path) -> str:
    """URL of the shared server or cluster of a label (a product, or a product and "-cluster"), empty when `folder` was
    not the last one that asked."""
    product, _, cluster = label.partition("-")
    servers = shared_cluster(product) if cluster else [shared_server(product)]
    if _LAST.get(label) != folder:
        for server in servers:
            server.command("FLUSHALL")
        _LAST[label] = folder
    return f"redis://{','.join(server.address for server in servers)}/"


def redis_catalog(label: str, folder: Path, clock: Clock) -> RedisCatalog:
    """A catalog, not yet open, of the store that stands for `folder`."""
    return RedisCatalog(parse_redis_url("catalog", store_url(label, folder)), clock)


def redis_blobs(label: str, folder: Path, query: str = "") -> RedisBlobs:
    """Blobs, not yet open, of the place that stands for `folder`; a folder in the last one is a place beside it."""
    inside = _LAST.get(label) == folder.parent
    url = store_url(label, folder.parent if inside else folder)
    place = "inside" if inside else "default"
    return RedisBlobs(parse_redis_url("blobs", f"{url}?namespace={place}&{query}"), chunk_bytes=CHUNK_BYTES_LEAST)
