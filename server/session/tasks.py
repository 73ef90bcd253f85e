"""The node's tasks: one owner holds the TaskGroup in which everything runs."""

import asyncio
import logging
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from forkpoint.errors import ForkpointError, NodeDrainingError

T = TypeVar("T")
log = logging.getLogger(__name__)


class TaskOwner:
    """Runs coroutines that belong to the node, not to a caller: a caller that is cancelled leaves them running.

    A caller whose work is cut off by `close` gets NodeDrainingError, one that comes later as well.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None
        self._holder: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Open the group."""
        ready = asyncio.Event()
        # owner: `close` awaits it; it holds the group in which everything else runs.
        self._holder = asyncio.get_running_loop().create_task(self._hold(ready))
        await ready.wait()

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        self._closing.set()
        if self._holder is not None:
            await self._holder

    def spawn(self, work: Coroutine[Any, Any, object], name: str) -> asyncio.Task[None]:
        """Run in the background; an exception is logged and ends nothing else."""
        group = self._open_group(work)
        task = group.create_task(_logged(work, name), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # it never began when the task was cancelled at once
        return task

    async def run(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """Run to its end even when the caller is cancelled; returns or raises what it does."""
        self._open_group(work)
        result: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        result.add_done_callback(_retrieve)
        task = self.spawn(self._into(work, result), name)
        task.add_done_callback(lambda _: self._cut_off(work, result))
        return await asyncio.shield(result)

    def _open_group(self, work: Coroutine[Any, Any, object]) -> asyncio.TaskGroup:
        if self._group is None or self._closing.is_set():
            work.close()
            raise NodeDrainingError(self._node)
        return self._group

    async def _into(self, work: Coroutine[Any, Any, T], result: "asyncio.Future[T]") -> None:
        try:
            value = await work
        except Exception as error:  # noqa: BLE001 - the caller gets it
            result.set_exception(error)
        except BaseException:
            result.set_exception(NodeDrainingError(self._node))
            raise
        else:
            result.set_result(value)

    def _cut_off(self, work: Coroutine[Any, Any, T], result: "asyncio.Future[T]") -> None:
        """The caller's answer, when the task was cancelled before it began: nothing else gives one."""
        if not result.done():
            work.close()
            result.set_exception(NodeDrainingError(self._node))

    async def _hold(self, ready: asyncio.Event) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            ready.set()
            await self._closing.wait()
            for task in self._tasks:
                task.cancel()


async def survive(round_: Awaitable[object], what: str) -> None:
    """Whatever goes wrong in a round, the next one comes."""
    try:
        await round_
    except ForkpointError as error:
        log.warning("%s failed: %s", what, error)
    except Exception:
        log.exception("%s failed", what)


async def _logged(work: Coroutine[Any, Any, object], name: str) -> None:
    try:
        await work
    except Exception:
        log.exception("%s failed", name)


def _retrieve(result: "asyncio.Future[T]") -> None:
    """Nobody may be left to take the exception: that is no leak worth a message."""
    if not result.cancelled():
        result.exception()
