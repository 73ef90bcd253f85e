"""Nodes of one process that call each other without a network, as far as the test lets them."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TypeVar

from forkpoint.errors import UnavailableError
from forkpoint.ids import SessionName
from forkpoint.server.session.node import Node
from forkpoint.server.session.ports import CutOverAsk, FollowAsk, FollowReport, TailedTokens
from forkpoint.statestore.records import NodeRow

T = TypeVar("T")
Answer = TypeVar("Answer", FollowReport, TailedTokens)


@dataclass
class Street:
    """Who lives where. `cut`: addresses that nobody reaches and that reach nobody. `seen`: calls and what they wait
    for, by method; `lost`: methods whose next answers do not come; `late`: those whose next calls arrive only when the
    event is set, though their caller gives up before."""

    nodes: dict[str, Node] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)
    late: dict[str, asyncio.Event] = field(default_factory=dict)
    before: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    after: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    watch: Callable[[str, bool], Awaitable[None]] | None = None
    """Told of each call, before it arrives (False) and after it was answered (True); may keep it."""
    tasks: set["asyncio.Task[object]"] = field(default_factory=set)

    def peers(self, address: str) -> "NearPeers":
        """The others as the node at `address` sees them."""
        return NearPeers(self, address)

    def reach(self, source: str, address: str) -> Node:
        """Raises UnavailableError."""
        node = self.nodes.get(address)
        if node is None or self.cut & {source, address}:
            raise UnavailableError(f"{address} can't be reached")
        return node


@dataclass
class NearPeers:
    """Implements Peers."""

    street: Street
    address: str

    async def follow(self, node: NodeRow, ask: FollowAsk) -> AsyncGenerator[FollowReport, None]:
        await self._arrive("follow")
        there = self.street.reach(self.address, node.address)
        async with (
            aclosing(there.follow(ask)) as reports,
            aclosing(self._while_reached(node.address, reports)) as reached,
        ):
            await self._answered("follow")
            async for report in reached:
                yield report

    async def cut_over(self, node: NodeRow, ask: CutOverAsk, timeout_seconds: float) -> int:
        await self._arrive("cut_over")
        there = self.street.reach(self.address, node.address)
        late = self.street.late.pop("cut_over", None)
        work = there.cut_over(ask) if late is None else _when(late, lambda: there.cut_over(ask))
        # owner: the street; as a call that has arrived, it is not undone by a caller who waits no longer
        task = asyncio.get_running_loop().create_task(work)
        self.street.tasks.add(task)
        task.add_done_callback(self.street.tasks.discard)
        try:
            async with asyncio.timeout(timeout_seconds):
                epoch = await asyncio.shield(task)
        except TimeoutError:
            raise UnavailableError(f"{node.node} did not answer in time") from None
        await self._answered("cut_over")
        if self.street.cut & {self.address, node.address}:
            raise UnavailableError(f"{node.node} can't be reached")
        if self.street.lost.get("cut_over", 0) > 0:
            self.street.lost["cut_over"] -= 1
            raise UnavailableError("the answer was lost")
        return epoch

    async def tail(self, address: str, name: SessionName, start: int) -> AsyncGenerator[TailedTokens, None]:
        there = self.street.reach(self.address, address)

        async def tokens() -> AsyncGenerator[TailedTokens, None]:
            async for chunk in there.read_tokens(name, start, None, True):
                if chunk.token_ids:
                    yield TailedTokens(chunk.start, chunk.token_ids, chunk.kinds, chunk.logprobs)

        async with aclosing(tokens()) as told, aclosing(self._while_reached(address, told)) as reached:
            async for part in reached:
                yield part

    async def _arrive(self, method: str) -> None:
        self.street.calls.append(method)
        if self.street.watch is not None:
            await self.street.watch(method, False)
        if method in self.street.before:
            await self.street.before.pop(method)()

    async def _answered(self, method: str) -> None:
        if self.street.watch is not None:
            await self.street.watch(method, True)
        if method in self.street.after:
            await self.street.after.pop(method)()

    async def _while_reached(self, address: str, items: AsyncGenerator[Answer, None]) -> AsyncGenerator[Answer, None]:
        """The items until the other end can't be reached any more."""
        node = self.street.nodes.get(address)
        begin = asyncio.get_running_loop().create_task  # owner: this call, which ends what it began
        following = begin(_next(items))
        try:
            while True:
                await asyncio.wait((following,), timeout=0.01)
                if self.street.cut & {self.address, address} or self.street.nodes.get(address) is not node:
                    raise UnavailableError(f"{address} can't be reached any more")
                if following.done():
                    try:
                        item = following.result()
                    except StopAsyncIteration:
                        return
                    yield item
                    following = begin(_next(items))
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def _next(items: AsyncGenerator[T, None]) -> T:
    return await anext(items)


async def _when(event: asyncio.Event, work: Callable[[], Awaitable[T]]) -> T:
    await event.wait()
    return await work()
