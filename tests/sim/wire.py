"""Calls of clients on nodes: a network in between, a process at the other end that may be stopped or killed."""

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Final, TypeVar

from forkpoint.errors import UnavailableError
from forkpoint.server.session.node import Node
from tests.sim.process import WORLD

if TYPE_CHECKING:
    from tests.sim.fleet import Seat

T = TypeVar("T")

NET_SECONDS: Final = (0.0002, 0.003)
PATIENCE_SECONDS: Final = 1.5
"""A client hangs up when nothing comes for so long."""


class Wire:
    """Runs in the world's context; what it starts at the other end belongs to the node's process."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def call(self, seat: "Seat", method: Callable[[Node], Awaitable[T]]) -> T:
        """One answer. Raises UnavailableError when the node is not there, dies, or says nothing."""

        async def one(node: Node) -> AsyncIterator[T]:
            yield await method(node)

        async with aclosing(self.stream(seat, one)) as answers:
            async for answer in answers:
                return answer
        raise UnavailableError(f"{seat.name} ended the call without an answer")

    async def stream(self, seat: "Seat", method: Callable[[Node], AsyncIterator[T]]) -> AsyncGenerator[T, None]:
        """What the node yields, in order; closing it cancels the call at the other end."""
        await asyncio.sleep(self._delay())
        process, node = seat.process, seat.node
        if process is None or node is None or process.severed or not seat.serves:
            raise UnavailableError(f"{seat.name}: connection refused")
        arrived: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        line = Line(arrived, self._delay)
        task = process.spawn(serve(line, method, node))
        forget = process.at_death(lambda: line.send("error", UnavailableError(f"{seat.name}: connection reset")))
        try:
            while True:
                async with asyncio.timeout(PATIENCE_SECONDS):
                    kind, value = await arrived.get()
                if kind == "end":
                    return
                if kind == "error":
                    raise value
                yield value
        except TimeoutError:
            raise UnavailableError(f"{seat.name}: no answer") from None
        finally:
            forget()
            # The news that the caller left travels too.
            asyncio.get_running_loop().call_later(self._delay(), task.cancel)

    def _delay(self) -> float:
        return self._rng.uniform(*NET_SECONDS)


class Line:
    """The way back: everything arrives later, in order."""

    def __init__(self, arrived: "asyncio.Queue[tuple[str, Any]]", delay: Callable[[], float]) -> None:
        self._arrived = arrived
        self._delay = delay
        self._last = 0.0
        self._loop = asyncio.get_running_loop()

    def send(self, kind: str, value: object) -> None:
        """Let it arrive."""
        self._last = max(self._last, self._loop.time() + self._delay())
        self._loop.call_at(self._last, self._arrived.put_nowait, (kind, value), context=WORLD)


async def serve(line: Line, method: Callable[[Node], AsyncIterator[T]], node: Node) -> None:
    """The handler, in the node's process."""
    try:
        async with aclosing(method(node)) as items:  # type: ignore[type-var]
            async for item in items:
                line.send("item", item)
    except Exception as error:  # noqa: BLE001 - the caller gets it
        line.send("error", error)
    else:
        line.send("end", None)
