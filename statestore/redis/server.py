"""Connections to one Redis server, or to whichever one the Sentinels name, and exchanges over them."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from redis.asyncio.connection import Connection, ConnectionPool, SSLConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import ExponentialBackoff
from redis.exceptions import ReadOnlyError, ResponseError

from forkpoint.statestore.redis.failures import failures
from forkpoint.statestore.redis.pack import Command, pack
from forkpoint.statestore.redis.url import RedisUrl

Reply = Any
"""What redis-py makes of a RESP2 reply: bytes, int, None, list of these; a ResponseError as a value where errors are
told apart by call."""
Greeting = Callable[[Any], Awaitable[None]]
"""Runs on every new connection before it is used; what it raises is what the call gets."""

CONNECT_TRIES: Final = 3
BACKOFF_BASE_SECONDS: Final = 0.02
BACKOFF_CAP_SECONDS: Final = 0.5
"""A server that restarts is back in moments; one that is gone costs a call less than a second beside its timeouts."""


class RedisServer:
    """One server's connections. Several calls run at once, each on a connection of its own."""

    def __init__(self, url: RedisUrl, host: str, port: int, greet: Greeting | None = None) -> None:
        self.address = (host, port)
        self.shown = f"{host}:{port}" if url.service is None else url.shown
        self._timeout = url.timeout
        self._greet = greet
        self._limit = asyncio.Semaphore(url.connections)
        self._sentinel: Any = None
        self._pool: Any = self._make_pool(url, host, port)
        self._closed = False

    def _make_pool(self, url: RedisUrl, host: str, port: int) -> Any:
        settings: dict[str, Any] = {
            "username": url.username,
            "password": url.password,
            "db": url.db,
            "socket_timeout": None,
            "socket_connect_timeout": url.connect_timeout,
            "socket_keepalive": True,
            "retry": Retry(ExponentialBackoff(BACKOFF_CAP_SECONDS, BACKOFF_BASE_SECONDS), CONNECT_TRIES - 1),
            "protocol": 2,
        }
        if self._greet is not None:
            settings["redis_connect_func"] = self._on_connect
        secure: dict[str, Any] = {}
        if url.tls is not None:
            secure = {
                "ssl_ca_certs": url.tls.ca,
                "ssl_certfile": url.tls.cert,
                "ssl_keyfile": url.tls.key,
                "ssl_check_hostname": url.tls.check_hostname,
            }
        if url.service is None:
            kind: Any = SSLConnection if url.tls else Connection
            return ConnectionPool(connection_class=kind, host=host, port=port, **settings, **secure)
        shared = {"socket_timeout": url.timeout, "socket_connect_timeout": url.connect_timeout, **secure}
        shared |= {"username": url.sentinel_username, "password": url.sentinel_password}
        if url.tls is not None:
            shared["ssl"] = True
        make_sentinel: Any = Sentinel
        make_pool: Any = SentinelConnectionPool
        self._sentinel = make_sentinel(list(url.hosts), sentinel_kwargs=shared)
        kind = SentinelManagedSSLConnection if url.tls else SentinelManagedConnection
        return make_pool(url.service, self._sentinel, connection_class=kind, **settings, **secure)

    async def _on_connect(self, connection: Any) -> None:
        await connection.on_connect()
        assert self._greet is not None
        try:
            await self._greet(connection)
        except BaseException:
            await connection.disconnect(nowait=True)
            raise

    async def exchange(self, commands: Sequence[Command], more_seconds: float = 0.0) -> list[Reply]:
        """Send commands over one connection, all at once, and read their replies; a command's own error is a value.

        `more_seconds`: what commands that block may take beside the URL's timeout. Raises StoreUnavailableError; then
        any part of it may have happened. Cancelling gives the connection up.
        """
        with failures(self.shown):
            async with self._limit, asyncio.timeout(self._timeout + more_seconds):
                connection = await self._pool.get_connection()
                try:
                    return await exchange_on(connection, commands)
                except BaseException:
                    await connection.disconnect(nowait=True)
                    raise
                finally:
                    await self._pool.release(connection)

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with failures(self.shown):
            await self._pool.disconnect()
            if self._sentinel is not None:
                for client in self._sentinel.sentinels:
                    await client.aclose()


async def exchange_on(connection: Any, commands: Sequence[Command]) -> list[Reply]:
    """As RedisServer.exchange, on a connection of the caller's. Raises redis-py's errors."""
    await connection.send_packed_command(pack(commands), check_health=False)
    replies: list[Reply] = []
    stale = False
    for _ in commands:
        try:
            replies.append(await connection.read_response())
        except ResponseError as error:
            replies.append(error)
            stale = stale or isinstance(error, ReadOnlyError)
    if stale:
        # A primary that became a replica: the next connection may lead to its successor.
        await connection.disconnect(nowait=True)
    return replies
