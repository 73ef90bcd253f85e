"""An event loop without a machine below it: time is virtual, and a seed decides what asyncio leaves open.

Nothing ever waits: when no callback is ready, the clock jumps to the next timer. Executors have no threads: what is
handed to one runs on the loop, a while later. Callbacks run in the order in which they were scheduled, as asyncio
promises, but tasks that are woken in one round take turns by the seed, since no task may rely on another's.
"""

import asyncio
import heapq
import itertools
import random
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Executor
from concurrent.futures import Future as ConcurrentFuture
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

from tests.sim.process import PROCESS, Condition, Process

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EXECUTOR_SECONDS = (0.0002, 0.003)
"""How long a call in an executor takes, at least and at most."""
TIMER_SECONDS = 1e-6
"""The shortest that a timer takes: no clock is finer, and time would stand still for who asks again and again for less
than a float can tell."""
ROUNDS_MAX = 200_000
"""Of one run. What a sound one needs is a few thousand; one that has more goes round without getting anywhere."""


class StuckError(AssertionError):
    """Nothing can happen any more, or what was awaited did not happen in its time."""


class SimLoop(asyncio.AbstractEventLoop):
    """As much of an event loop as asyncio's tasks, futures and primitives need."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now = 0.0
        self._ready: list[asyncio.Handle] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._numbers = itertools.count()
        self._closed = False
        self._running = False
        self._busy_until: dict[Executor | None, float] = {}
        self.rounds = 0
        self.troubles: list[dict[str, Any]] = []
        """What tasks and callbacks failed with, unseen by anyone."""

    # --- running -----------------------------------------------------------------------------------------------
    def run(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        """Run to the end of `work`. Raises StuckError when that takes more than `seconds` of virtual time, or when the
        loop has gone round ROUNDS_MAX times in all its runs."""
        deadline = self._now + seconds
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(finalizer=self._finalise)
        asyncio.events._set_running_loop(self)
        self._running = True
        try:
            task = self.create_task(work)  # owner: this call runs it to its end
            while not task.done():
                self._round(deadline)
        finally:
            self._running = False
            asyncio.events._set_running_loop(None)
            sys.set_asyncgen_hooks(*hooks)
        return task.result()

    def _round(self, deadline: float) -> None:
        """Run what is ready; what that makes ready runs in the next round."""
        self.rounds += 1
        if self.rounds > ROUNDS_MAX:
            raise StuckError(f"not done after {ROUNDS_MAX} rounds, at {self._now:.3f} virtual seconds")
        if not self._ready:
            while self._timers and self._timers[0][2].cancelled():
                heapq.heappop(self._timers)
            if not self._timers:
                raise StuckError("everything waits for something else")
            if self._timers[0][0] > deadline:
                raise StuckError(f"not done after {deadline:.1f} virtual seconds")
            self._now = max(self._now, self._timers[0][0])
        timers, now = self._timers, self._now
        while timers and timers[0][0] <= now:
            self._ready.append(heapq.heappop(timers)[2])
        batch, self._ready = self._ready, []
        if len(batch) > 1:
            self._shuffle_tasks(batch)
        for handle in batch:
            if handle._cancelled:
                continue
            process: Process | None = handle._context.get(PROCESS)  # type: ignore[attr-defined]
            if process is None or process.condition is Condition.RUNNING:
                handle._run()
            else:
                process.held.append(handle)

    def _shuffle_tasks(self, batch: list[asyncio.Handle]) -> None:
        """Other callbacks keep their places."""
        places = []
        for place, handle in enumerate(batch):
            owner = getattr(handle._callback, "__self__", None)  # type: ignore[attr-defined]
            if isinstance(owner, asyncio.Task):
                places.append((owner.sim_number, place))  # type: ignore[attr-defined]
        if len(places) < 2:
            return
        # asyncio cancels a group's tasks in the order of their addresses: only their numbers are the seed's.
        chosen = [batch[place] for _, place in sorted(places)]
        self._rng.shuffle(chosen)
        for place, handle in zip(sorted(place for _, place in places), chosen, strict=True):
            batch[place] = handle

    def release(self, process: Process) -> None:
        """Let what a process could not do happen now."""
        self._ready += process.held
        process.held = []

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        self._closed = True
        self._ready, self._timers = [], []

    def get_debug(self) -> bool:
        return False

    def _finalise(self, generator: AsyncGenerator[Any, Any]) -> None:
        if not self._closed:
            self.create_task(generator.aclose())  # owner: the loop, as in asyncio's own

    # --- callbacks ---------------------------------------------------------------------------------------------
    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        when = self._now + max(delay, TIMER_SECONDS) if delay > 0 else self._now
        return self.call_at(when, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio tells; the heap drops it when its time comes."""

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> "asyncio.Task[T]":
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, name=name, context=context)
        task.sim_number = next(self._numbers)  # type: ignore[attr-defined]
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.troubles.append(context)

    # --- executors ---------------------------------------------------------------------------------------------
    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> "asyncio.Future[T]":
        """An executor of one's own has one thread: its calls follow one another. The default one has many."""
        future: asyncio.Future[T] = self.create_future()
        begin = self._now if executor is None else max(self._now, self._busy_until.get(executor, 0.0))
        end = begin + self._rng.uniform(*EXECUTOR_SECONDS)
        if executor is not None:
            self._busy_until[executor] = end
        cancelled_at: list[float] = []
        future.add_done_callback(lambda done: cancelled_at.append(self._now) if done.cancelled() else None)

        def work() -> None:
            if getattr(executor, "_shutdown", False):
                future.cancel()
            if future.cancelled() and (not cancelled_at or cancelled_at[0] <= begin):
                return  # it had not begun
            try:
                value = func(*args)
            except Exception as error:  # noqa: BLE001 - the caller gets it
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(value)

        self.call_at(end, work)
        return future

    def submit(self, work: Callable[[], T]) -> "ConcurrentFuture[T]":
        """Stands for `submit` of a pool that the product keeps for itself: many threads."""
        future: ConcurrentFuture[T] = ConcurrentFuture()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                value = work()
            except Exception as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)
            else:
                future.set_result(value)

        self.call_later(self._rng.uniform(*EXECUTOR_SECONDS), run)
        return future
