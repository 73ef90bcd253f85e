"""The one thread that touches the engine."""

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from forkpoint.server.engine.base import Capacity, Capture, Engine
from forkpoint.server.session.progress import Progress

P = ParamSpec("P")
T = TypeVar("T")


class EngineThread:
    """Calls run in the order in which they were made."""

    def __init__(self, engine: Engine, progress: Progress) -> None:
        self.engine = engine
        self.facts = engine.facts
        self.known_capacity: Capacity | None = None
        """Pool sizes as they were when somebody last asked."""
        self._progress = progress
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `function` in the engine thread. Cancelling the wait does not stop it."""

        def run() -> T:
            with self._progress.under_way("a call of the engine"):
                return function(*args, **kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._executor, run)

    async def capacity(self) -> Capacity:
        """Pool sizes now."""
        self.known_capacity = await self.call(self.engine.capacity)
        return self.known_capacity

    async def capture(self, sequence: int, known: Collection[str]) -> Capture:
        """The state at the sequence's last grid point, without settled parts that are `known`."""
        return await self.call(self.engine.capture, sequence, known)

    async def free(self, sequence: int) -> None:
        """Give the sequence back."""
        await self.call(self.engine.free, sequence)

    def close(self) -> None:
        """End the thread after its running call."""
        self._executor.shutdown(wait=False, cancel_futures=True)
