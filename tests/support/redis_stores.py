"""Stores on the shared test servers: each folder is a store of its own, the one before it is cleared away."""

from pathlib import Path

from forkpoint.clock import Clock
from forkpoint.statestore.redis.catalog import RedisCatalog
from forkpoint.statestore.redis.url import parse_redis_url
from tests.support.redis_servers import RedisServerProcess, shared_server

_LAST: dict[str, Path] = {}


def server_for(product: str, folder: Path) -> RedisServerProcess:
    """The product's shared server, empty when `folder` was not the last one that asked."""
    server = shared_server(product)
    if _LAST.get(product) != folder:
        server.command("FLUSHALL")
        _LAST[product] = folder
    return server


def redis_catalog(product: str, folder: Path, clock: Clock) -> RedisCatalog:
    """A catalog, not yet open, of the store that stands for `folder`."""
    return RedisCatalog(parse_redis_url("catalog", server_for(product, folder).url()), clock)
