"""A proxy before a Redis server that loses requests or answers when told."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RedisProxy:
    """Passes bytes on, until a fault is armed; each fault strikes once and takes the connection with it."""

    def __init__(self, port: int) -> None:
        self._server_port = port
        self.port = 0
        self._lose_request = False
        self._lose_answer = False

    def lose_next_request(self) -> None:
        """The next bytes of a client never reach the server."""
        self._lose_request = True

    def lose_next_answer(self) -> None:
        """The server does what it is asked next; its answer never comes back."""
        self._lose_answer = True

    def pass_all(self) -> None:
        """No fault is armed any more."""
        self._lose_request = self._lose_answer = False

    def url(self) -> str:
        """Of the server, through the proxy."""
        return f"redis://127.0.0.1:{self.port}/"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One client's connection."""
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._server_port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_requests(reader, there_writer))
                group.create_task(self._pass_answers(there_reader, writer))
        except* (ConnectionError, EOFError):
            pass
        finally:
            for end in (writer, there_writer):
                end.close()
                with contextlib.suppress(ConnectionError):
                    await end.wait_closed()

    async def _pass_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            if self._lose_request:
                self._lose_request = False
                raise EOFError
            writer.write(data)
            await writer.drain()
        raise EOFError

    async def _pass_answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65_536):
            if self._lose_answer:
                self._lose_answer = False
                raise EOFError
            writer.write(data)
            await writer.drain()
        raise EOFError


@asynccontextmanager
async def redis_proxy(port: int) -> AsyncIterator[RedisProxy]:
    """A proxy of the server at a local port."""
    proxy = RedisProxy(port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await server.wait_closed()
