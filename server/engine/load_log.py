"""LoadLog: what a node without a terminal says while its model loads."""

import logging
from threading import Event
from typing import Final

from forkpoint.clock import Clock
from forkpoint.model.digest import LoadProgress

LINE_SECONDS: Final = 10.0
"""Between two lines."""

log = logging.getLogger(__name__)


class LoadLog:
    """A LoadProgress that logs a line every LINE_SECONDS, and one when all is read."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began = self._said = clock.monotonic()

    def __call__(self, done: int, total: int) -> None:
        now = self._clock.monotonic()
        if done < total and now - self._said < LINE_SECONDS:
            return
        self._said = now
        facts = {"bytes": done, "of_bytes": total, "seconds": round(now - self._began, 3)}
        log.info("the model is loaded" if done == total else "loading the model", extra={"facts": facts})


class LoadStoppedError(Exception):
    """Nobody waits for the model any more."""


class Stoppable:
    """A LoadProgress that passes on, until `stop` makes the loading end at its next tensor, with LoadStoppedError."""

    def __init__(self, progress: LoadProgress | None) -> None:
        self._progress, self._stopped = progress, Event()

    def stop(self) -> None:
        """May be called by any thread."""
        self._stopped.set()

    def __call__(self, done: int, total: int) -> None:
        if self._stopped.is_set():
            raise LoadStoppedError
        if self._progress is not None:
            self._progress(done, total)
