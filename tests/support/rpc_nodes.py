"""Several real servers in the test's process, over one SQLite file and one folder of blobs."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forkpoint.server.rpc.routes import DIRECT
from tests.support.hash_engine import HashEngine
from tests.support.rpc_site import Served, served

DIRECTLY: Final = ((DIRECT, "1"),)
"""Metadata of a call that is not to be sent on."""


@dataclass
class Nodes:
    """Nodes a, b, c, ... each with its engine and clients."""

    folder: Path
    make_engine: Callable[[], HashEngine] = HashEngine
    stack: AsyncExitStack = field(default_factory=AsyncExitStack)
    by_name: dict[str, Served] = field(default_factory=dict)
    _stacks: dict[str, AsyncExitStack] = field(default_factory=dict)

    async def start(self, name: str, **settings: Any) -> Served:
        """Start a node; the first one makes workflow `w`. Returns once every node knows of all."""
        stack = self._stacks[name] = await self.stack.enter_async_context(AsyncExitStack())
        one = await stack.enter_async_context(
            served(self.folder, self.make_engine(), workflow=not self.by_name, node=name, **settings)
        )
        self.by_name[name] = one
        for site in self.by_name.values():
            await site.running.node.members.refresh()
        return one

    async def stop(self, name: str) -> None:
        """Let it leave as on SIGTERM."""
        del self.by_name[name]
        await self._stacks.pop(name).aclose()

    async def vanish(self, name: str) -> None:
        """As a killed process, for all that others can see: its connections break, its lock is free, its row stays."""
        site = self.by_name.pop(name)
        assert site.running.rpc.guard.forwarder is not None
        await site.running.rpc.guard.forwarder.close()
        await site.running.rpc._server.stop(None)
        await site.running.node.abandon()


@asynccontextmanager
async def nodes(
    folder: Path, names: str = "ab", make_engine: Callable[[], HashEngine] = HashEngine
) -> AsyncIterator[Nodes]:
    """Running nodes, named by letters."""
    running = Nodes(folder, make_engine)
    async with running.stack:
        for name in names:
            await running.start(name)
        yield running
