"""Calls from node to node: a network that is slow, loses things and is cut, between processes that stop and die."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forkpoint.errors import UnavailableError
from forkpoint.ids import SessionName
from forkpoint.server.session.node import Node
from forkpoint.server.session.ports import CutOverAsk, FollowAsk, FollowReport, TailedTokens
from forkpoint.statestore.records import NodeRow
from tests.sim.link import LATE_SECONDS, Weather
from tests.sim.process import WORLD, Condition, Process
from tests.sim.wire import NET_SECONDS, Line, serve

if TYPE_CHECKING:
    from tests.sim.fleet import Seat

T = TypeVar("T")

LOOK_SECONDS: Final = 0.2
"""How often a call under way looks whether the other end can still be reached."""
SILENT_SECONDS: Final = 0.8
"""A node that is stopped for so long does not answer the connection's own questions: its calls break."""


class Roads:
    """Which pairs of nodes can't reach each other now."""

    def __init__(self) -> None:
        self.cut: set[frozenset[str]] = set()

    def are_cut(self, one: str, other: str) -> bool:
        """Whether nothing gets from one to the other."""
        return frozenset((one, other)) in self.cut


class SimPeers:
    """The others as one process sees them. Implements Peers."""

    def __init__(
        self, own: str, process: Process, seats: "Sequence[Seat]", roads: Roads, weather: Weather, rng: random.Random
    ) -> None:
        self._own = own
        self._process = process
        self._seats = seats
        self._roads = roads
        self._weather = weather
        self._rng = rng

    async def follow(self, node: NodeRow, ask: FollowAsk) -> AsyncGenerator[FollowReport, None]:
        async with aclosing(self._stream(node.address, lambda there: there.follow(ask))) as reports:
            async for report in reports:
                yield report

    async def cut_over(self, node: NodeRow, ask: CutOverAsk, timeout_seconds: float) -> int:
        async def one(there: Node) -> AsyncIterator[int]:
            yield await there.cut_over(ask)

        try:
            async with asyncio.timeout(timeout_seconds):
                async with aclosing(self._stream(node.address, one)) as answers:
                    async for epoch in answers:
                        return epoch
        except TimeoutError:
            raise UnavailableError(f"{node.node}: no answer in time") from None
        raise UnavailableError(f"{node.node} ended the call without an answer")

    async def tail(self, address: str, name: SessionName, start: int) -> AsyncGenerator[TailedTokens, None]:
        def tokens(there: Node) -> AsyncIterator[TailedTokens]:
            return _tokens(there, name, start)

        async with aclosing(self._stream(address, tokens)) as parts:
            async for part in parts:
                yield part

    async def _stream(self, address: str, method: Callable[[Node], AsyncIterator[T]]) -> AsyncGenerator[T, None]:
        """What the node at `address` yields. It is cancelled there when this is closed, or this process dies; a request
        may be lost, or arrive long after its caller gave up, and so may the first answer."""
        await asyncio.sleep(self._delay())
        seat = next((seat for seat in self._seats if f"{seat.name}:1" == address), None)
        there, node = (None, None) if seat is None else (seat.process, seat.node)
        if seat is None or there is None or node is None or there.severed or not seat.serves:
            raise UnavailableError(f"{address}: connection refused")
        if self._roads.are_cut(self._own, seat.name) or self._rng.random() < self._weather.lost_request:
            await asyncio.sleep(LOOK_SECONDS)
            raise UnavailableError(f"{address} can't be reached")
        arrived: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        line = Line(arrived, self._delay)
        if self._rng.random() < self._weather.late:
            self._arrive_late(there, serve(Line(asyncio.Queue(), self._delay), method, node))
            await asyncio.sleep(LOOK_SECONDS)
            raise UnavailableError(f"{address}: no answer")
        task = there.spawn(serve(line, method, node))
        loop = asyncio.get_running_loop()

        def reset() -> None:
            line.send("error", UnavailableError(f"{address}: connection reset"))

        def leave() -> None:
            loop.call_later(self._delay(), task.cancel, context=WORLD)

        ends = (there.at_death(reset), self._process.at_death(leave))
        try:
            async with aclosing(self._received(arrived, seat, there)) as items:
                async for item in items:
                    if self._rng.random() < self._weather.lost_answer:
                        raise UnavailableError(f"{address}: the answer was lost")
                    yield item
        finally:
            for forget in ends:
                forget()
            leave()

    async def _received(
        self, arrived: "asyncio.Queue[tuple[str, Any]]", seat: "Seat", there: Process
    ) -> AsyncGenerator[Any, None]:
        """Items, until the end or an error, or until the other node can't be reached any more."""
        silent = 0.0
        while True:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    kind, value = await arrived.get()
            except TimeoutError:
                silent = silent + LOOK_SECONDS if there.condition is Condition.STOPPED else 0.0
                if self._roads.are_cut(self._own, seat.name) or silent >= SILENT_SECONDS:
                    raise UnavailableError(f"{seat.name} can't be reached any more") from None
                continue
            if self._roads.are_cut(self._own, seat.name):
                raise UnavailableError(f"{seat.name} can't be reached any more")
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value

    def _arrive_late(self, there: Process, work: Any) -> None:
        loop, hold = asyncio.get_running_loop(), self._rng.uniform(*LATE_SECONDS)

        def begin() -> None:
            if there.condition is Condition.DEAD or there.severed:
                work.close()
                return
            task = there.spawn(work)
            loop.call_later(LOOK_SECONDS, task.cancel, context=WORLD)

        loop.call_later(hold, begin, context=WORLD)

    def _delay(self) -> float:
        return self._rng.uniform(*NET_SECONDS)


async def _tokens(there: Node, name: SessionName, start: int) -> AsyncIterator[TailedTokens]:
    async for chunk in there.read_tokens(name, start, None, True):
        if chunk.token_ids:
            yield TailedTokens(chunk.start, chunk.token_ids, chunk.kinds, chunk.logprobs)
