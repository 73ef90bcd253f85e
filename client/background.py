"""The thread that runs the event loop for clients of code that has none."""

import asyncio
import atexit
import concurrent.futures
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from forkpoint.client.errors import ClientClosedError
from forkpoint.client.forked import check_process

R = TypeVar("R")
THREAD_NAME: Final = "forkpoint-client"


class Background:
    """An event loop in a daemon thread, shared by everyone who holds it: it begins with the first holder and ends with
    the last, which waits for it. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a garbage collection under it may call `start`
        self._holders = 0
        self._process = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def is_here(self) -> bool:
        """Whether the thread could be in this process: it is in no child that was forked from its own."""
        return os.getpid() == self._process

    def hold(self) -> None:
        """Keep the loop running until `release`. Raises ForkedProcessError."""
        check_process()
        with self._lock:
            self._holders += 1
            if self._loop is None:
                self._process = os.getpid()
                self._loop = asyncio.new_event_loop()
                self._loop.set_exception_handler(_told)
                self._thread = threading.Thread(target=_serve, args=(self._loop,), name=THREAD_NAME, daemon=True)
                self._thread.start()

    def release(self, wait: bool = True) -> None:
        """End one hold. The last one cancels what still runs, and waits for the thread unless told not to."""
        if not self.is_here:
            return
        with self._lock:
            self._holders -= 1
        if self._holders == 0:
            self.end(wait)

    def end(self, wait: bool = True) -> None:
        """Cancel what runs and end the thread, whoever holds it: for the end of the program."""
        if not self.is_here:
            return
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = None
        if loop is None or thread is None:
            return
        loop.call_soon_threadsafe(loop.stop)
        if wait and thread is not threading.current_thread():
            thread.join()

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Run `work` on the loop and wait for it. Raises what it raises, ClientClosedError, ForkedProcessError, and
        RuntimeError on the loop's own thread, which would wait for itself. When the wait is interrupted, as by Ctrl-C,
        `work` is cancelled."""
        try:
            check_process()
            if self._thread is threading.current_thread():
                raise RuntimeError("the client's own thread can't wait for a call")
            future = self._submit(work)
        except BaseException:
            work.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise ClientClosedError from None
        except BaseException:
            future.cancel()
            raise

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work` on the loop without waiting, for tidying up; where there is no loop any more, nothing is left to
        tidy."""
        if not self.is_here:
            work.close()
            return
        try:
            self._submit(work)
        except ClientClosedError:
            work.close()

    def _submit(self, work: Coroutine[Any, Any, R]) -> "concurrent.futures.Future[R]":
        with self._lock:  # so that the loop can't stop before it knows of the work
            if self._loop is None:
                raise ClientClosedError
            return asyncio.run_coroutine_threadsafe(work, self._loop)


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    """The thread: run until the loop is stopped, then end what is left as asyncio.run does."""
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
    finally:
        try:
            left = asyncio.all_tasks(loop)
            for task in left:
                task.cancel()
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            loop.close()


def _told(loop: asyncio.AbstractEventLoop, event: dict[str, Any]) -> None:
    """gRPC wakes every loop of a process through one socket, and those that come too late find it empty: that is no
    error. Everything else is told as asyncio does."""
    if isinstance(event.get("exception"), BlockingIOError):
        return
    loop.default_exception_handler(event)


BACKGROUND: Final = Background()
"""Of this process. gRPC's event loops disturb each other, so all clients share one."""
atexit.register(BACKGROUND.end)


class Hold:
    """One client's hold of the loop. It ends with `release`, or else with the last object that runs something through
    it, or with the program; `closing` makes what is run then. Every method may be called from any thread."""

    def __init__(self, closing: Callable[[], Coroutine[Any, Any, None]], background: Background = BACKGROUND) -> None:
        background.hold()
        self._background, self._closing = background, closing
        self._end = weakref.finalize(self, _end, background, closing)

    def run(self, work: Coroutine[Any, Any, R]) -> R:
        """As Background.run."""
        return self._background.run(work)

    def start(self, work: Coroutine[Any, Any, object]) -> None:
        """As Background.start."""
        self._background.start(work)

    def release(self) -> None:
        """Close, and let the loop go. Idempotent; nothing in a forked child."""
        if self._end.detach() is None or not self._background.is_here:
            return
        try:
            self._background.run(self._closing())
        finally:
            self._background.release()


def _end(background: Background, closing: Callable[[], Coroutine[Any, Any, None]]) -> None:
    background.start(closing())
    background.release(wait=False)  # a garbage collection runs in any thread, and may hold what the loop waits for
