"""What is told while a model loads: to a log, seldom; and how a loading is stopped."""

import logging

import pytest

from forkpoint.server.engine.load_log import LINE_SECONDS, LoadLog, LoadStoppedError, Stoppable


class HandClock:
    """A clock that is set by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def wall_us(self) -> int:
        return 0


def test_a_log_has_a_line_every_so_many_seconds_and_one_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = HandClock()
    told = LoadLog(clock)
    with caplog.at_level(logging.INFO):
        for done in range(1, 26):
            clock.now += 1
            told(done, 25)
    lines = [(record.message, record.__dict__["facts"]["bytes"]) for record in caplog.records]
    steps = int(LINE_SECONDS)
    assert lines == [("loading the model", steps), ("loading the model", 2 * steps), ("the model is loaded", 25)]
    assert caplog.records[-1].__dict__["facts"] == {"bytes": 25, "of_bytes": 25, "seconds": 25.0}


def test_what_is_stopped_ends_at_the_next_tensor() -> None:
    told: list[tuple[int, int]] = []
    stoppable = Stoppable(lambda done, total: told.append((done, total)))
    stoppable(1, 3)
    stoppable.stop()
    with pytest.raises(LoadStoppedError):
        stoppable(2, 3)
    assert told == [(1, 3)]
    Stoppable(None)(1, 3)
