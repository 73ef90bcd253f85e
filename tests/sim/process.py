"""A simulated operating system process: what runs in its context stops when it is stopped, and for ever when killed."""

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from enum import Enum
from typing import Any, Final, TypeVar

T = TypeVar("T")


class Condition(Enum):
    """What the machine lets a process do."""

    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    """As SIGSTOP: its callbacks wait, timers and answers too."""
    DEAD = "DEAD"
    """As SIGKILL: its callbacks never run."""


class Process:
    """Every task that is made in its context, and every callback of such a task, belongs to it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.condition = Condition.RUNNING
        self.held: list[asyncio.Handle] = []
        self.severed = False
        """Nothing that it does reaches the outside any more."""
        self.tasks: set[asyncio.Task[Any]] = set()
        self._at_death: dict[int, Callable[[], None]] = {}
        self._number = 0
        self._context = copy_context()
        self._context.run(PROCESS.set, self)

    def context(self) -> Context:
        """A fresh context in which to run something as this process."""
        return self._context.copy()

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run a task as this process."""
        # owner: whoever spawned it, by `ends`
        task = asyncio.get_running_loop().create_task(work, context=self.context())
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard, context=self.context())
        return task

    def at_death(self, tell: Callable[[], None]) -> Callable[[], None]:
        """Let `tell` be called when it is killed, unless what is returned was called before."""
        self._number += 1
        number = self._number
        self._at_death[number] = tell

        def forget() -> None:
            self._at_death.pop(number, None)

        return forget

    async def ends(self, task: "asyncio.Task[Any]") -> bool:
        """Wait until the task has ended, or never will: then False."""
        told: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def tell(ended: bool) -> None:
            if not told.done():
                told.set_result(ended)

        task.add_done_callback(lambda _: tell(True), context=WORLD)
        forget = self.at_death(lambda: tell(False))
        if self.condition is Condition.DEAD:
            return False
        try:
            return await told
        finally:
            forget()

    def kill(self) -> None:
        """As SIGKILL."""
        self.condition = Condition.DEAD
        self.severed = True
        told, self._at_death = self._at_death, {}
        for tell in told.values():
            tell()


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""Whose callback is running; None: the world's."""

WORLD: Final = Context()
"""Context of what belongs to no process: the store, the network, the clients."""
