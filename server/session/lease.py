"""Liveness of a serving process: a lock file held for life, and a counter that a thread of its own keeps moving."""

import asyncio
import contextlib
import fcntl
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from forkpoint.clock import Clock
from forkpoint.errors import ForkpointError
from forkpoint.statestore.records import NodeRow

log = logging.getLogger(__name__)


class IncarnationLock:
    """An flock on a file of the incarnation's own. The kernel drops it when the process dies."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, path: Path) -> Self:
        """Create the file and lock it. Raises OSError (BlockingIOError when somebody holds it)."""
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return cls(path, descriptor)

    def release(self, unlink: bool) -> None:
        """Drop the lock, as the process's death would; `unlink` removes the file as well. Idempotent."""
        if self._descriptor is None:
            return
        if unlink:
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()
        os.close(self._descriptor)
        self._descriptor = None


def lock_is_free(path: Path) -> bool | None:
    """Whether nobody holds the lock; None where the file is not to be seen (another host)."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def remove_lock_file(node: NodeRow) -> None:
    """Tidy up after a dead incarnation; its name is never used again."""
    if node.lock_path:
        Path(node.lock_path).unlink(missing_ok=True)


class LeaseKeeper:
    """Renews every `interval` seconds in its own thread, so that a long step does not look like death."""

    def __init__(self, renew: Callable[[], object], interval: float, close: Callable[[], None] = lambda: None) -> None:
        self._renew = renew
        self._close = close
        self._interval = interval
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Begin to renew."""
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing; returns at once."""
        self._stopping.set()

    async def join(self) -> None:
        """Wait for the thread's end."""
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            self._renew_until_stopped()
        finally:
            self._close()

    def _renew_until_stopped(self) -> None:
        while not self._stopping.wait(self._interval):
            try:
                self._renew()
            except Exception as error:
                # A thread that ended would make a living node look dead.
                log.warning("the lease was not renewed: %s", error, exc_info=not isinstance(error, ForkpointError))


class DeathWatch:
    """Judges other incarnations: dead at once when their flock is free, and when their counter stands still for TTL +
    skew on this process's clock.

    A counter may also stand still because the store takes no renewals, or because this process was stopped and saw
    nothing. So time passes for the others only while the own counter moves: each of its moves proves at most half of
    that time, and after a rest that is longer than all of it everybody's time begins anew.
    """

    def __init__(self, clock: Clock, patience: float) -> None:
        self._clock = clock
        self._patience = patience
        self._seen: dict[str, tuple[int, float]] = {}
        """Counter of each incarnation, and when it was first seen, in proven time."""
        self._proven = 0.0
        """Seconds that had passed when the own counter was last seen to have moved."""
        self._moved: float | None = None
        """When that was, on our clock; None: never."""
        self._looked = 0.0
        """When the last look began, on our clock."""

    def observe(self, nodes: Sequence[NodeRow], own: str, began: float) -> None:
        """Note rows that were read just now, by a read that began at `began`; `own`: who reads."""
        now = self._clock.monotonic()
        self._looked = began
        mine = next((node.counter for node in nodes if node.incarnation == own), None)
        if mine is not None and self._seen.get(own, (None, 0.0))[0] != mine:
            if self._moved is None or now - self._moved > self._patience:
                self._seen.clear()
            self._proven, self._moved = self._time(now), now
        listed = {node.incarnation for node in nodes}
        self._seen = {incarnation: seen for incarnation, seen in self._seen.items() if incarnation in listed}
        for node in nodes:
            if self._seen.get(node.incarnation, (None, 0.0))[0] != node.counter:
                self._seen[node.incarnation] = (node.counter, self._time(now))

    def is_dead(self, node: NodeRow) -> bool:
        """Whether an incarnation is certainly dead, by what was observed; it blocks for no time."""
        if node.lock_path and lock_is_free(Path(node.lock_path)):
            return True
        # A held lock proves no life: a process that is stopped holds it as well.
        if self._moved is None or node.incarnation not in self._seen:
            return False
        counter, since = self._seen[node.incarnation]
        return counter == node.counter and self._time(self._looked) - since >= self._patience

    def _time(self, when: float) -> float:
        """Proven seconds at a moment of our clock."""
        if self._moved is None:
            return self._proven
        return self._proven + min(max(0.0, when - self._moved), self._patience / 2)
