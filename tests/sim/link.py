"""One node's way to the store: slow, lossy, and now and then cut. What it does to a call is drawn from the seed."""

import asyncio
import inspect
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Final, cast

from forkpoint.errors import StoreUnavailableError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from tests.sim.process import WORLD, Process
from tests.sim.store import Reply, SimStore
from tests.sim.watch import Call

PATIENCE_SECONDS: Final = 0.15
"""A call that is not answered by then has failed."""
FAST_SECONDS: Final = (0.0002, 0.002)
SLOW_SECONDS: Final = (0.005, 0.1)
LATE_SECONDS: Final = (0.1, 1.0)


@dataclass
class Weather:
    """Shares of calls that fare badly, for all links alike."""

    slow: float = 0.0
    lost_request: float = 0.0
    lost_answer: float = 0.0
    """The call takes effect, its caller gets an error."""

    late: float = 0.0
    """The call takes effect long after its caller has given up."""

    def calm(self) -> None:
        """From now on nothing goes wrong."""
        self.slow = self.lost_request = self.lost_answer = self.late = 0.0


class Link:
    """The store's ports as one node sees them."""

    def __init__(self, store: SimStore, process: Process, weather: Weather, rng: random.Random) -> None:
        self._store = store
        self._process = process
        self._weather = weather
        self._rng = rng
        self.cut = False
        self.caller = ""
        self.catalog = cast(Catalog, _Port(self, store, "catalog"))
        self.blobs = cast(BlobStore, _Port(self, store, "blobs"))

    async def call(self, port: str, method: str, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Send a call and wait for what becomes of it."""
        if self._process.severed:
            raise StoreUnavailableError(port, "the connection is closed")
        loop, rng = asyncio.get_running_loop(), self._rng
        answer: asyncio.Future[Any] = loop.create_future()
        # What is sent is sent: the caller's buffers are its own again.
        sent = tuple(bytes(value) if isinstance(value, memoryview | bytearray) else value for value in args)
        call = Call(port, method, sent, keywords, self.caller)
        deadline = loop.time() + PATIENCE_SECONDS
        if self.cut or rng.random() < self._weather.lost_request:
            self._silence(answer, deadline)
        elif rng.random() < self._weather.late:
            self._silence(answer, deadline)
            loop.call_later(rng.uniform(*LATE_SECONDS), self._store.execute_if_up, call, context=WORLD)
        else:
            loop.call_later(self._delay(), self._arrive, answer, call, deadline, context=WORLD)
        return await answer

    def _delay(self) -> float:
        return self._rng.uniform(*(SLOW_SECONDS if self._rng.random() < self._weather.slow else FAST_SECONDS))

    def _arrive(self, answer: "asyncio.Future[Any]", call: Call, deadline: float) -> None:
        if answer.done() or self.cut:
            # A client that gave up closes its connection: what it sent is not executed.
            self._silence(answer, deadline)
        elif not self._store.up:
            self._fail(answer, "connection refused")
        else:
            reply, loop = self._store.execute(call), asyncio.get_running_loop()
            if self._rng.random() < self._weather.lost_answer or reply.ready > deadline:
                self._silence(answer, deadline)
            elif reply.ready > loop.time():
                loop.call_at(reply.ready, self._send, answer, reply, deadline, context=WORLD)
            else:
                self._send(answer, reply, deadline)

    def _send(self, answer: "asyncio.Future[Any]", reply: Reply, deadline: float) -> None:
        """The store may say it now, if it is still the one that executed the call."""
        loop = asyncio.get_running_loop()
        arrives = loop.time() + self._delay()
        if self._store.still_true(reply) and not self.cut and arrives <= deadline:
            loop.call_at(arrives, self._deliver, answer, reply, deadline, context=WORLD)
        else:
            self._silence(answer, deadline)

    def _deliver(self, answer: "asyncio.Future[Any]", reply: Reply, deadline: float) -> None:
        if self.cut:
            self._silence(answer, deadline)
        elif answer.done():
            return
        elif reply.error is not None:
            answer.set_exception(reply.error)
        else:
            answer.set_result(reply.value)

    def _silence(self, answer: "asyncio.Future[Any]", deadline: float) -> None:
        """No answer comes; the caller gives up in its time."""
        asyncio.get_running_loop().call_at(deadline, self._fail, answer, "no answer", context=WORLD)

    def _fail(self, answer: "asyncio.Future[Any]", cause: str) -> None:
        if not answer.done():
            answer.set_exception(StoreUnavailableError("store", cause))


class _Port:
    """Stands for one of the two ports."""

    def __init__(self, link: Link, store: SimStore, port: str) -> None:
        self._link = link
        self._store = store
        self._port = port

    @property
    def durability(self) -> Any:
        """What the simulated store gives."""
        return self._store.durability

    def __getattr__(self, method: str) -> Any:
        attribute = getattr(getattr(self._store, self._port), method)
        if not callable(attribute):
            return attribute
        if inspect.isasyncgenfunction(attribute):
            return lambda *args: self._items(method, args)

        async def call(*args: Any, **keywords: Any) -> Any:
            if method in ("open", "close"):
                return None
            return await self._link.call(self._port, method, args, keywords)

        setattr(self, method, call)
        return call

    async def _items(self, method: str, args: tuple[Any, ...]) -> AsyncIterator[Any]:
        for item in await self._link.call(self._port, method, args, {}):
            yield item
