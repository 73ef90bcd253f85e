"""A sync shared by all who wait for one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from forkpoint.statestore.file.groupsync import GroupSync


def test_nobody_goes_on_before_a_sync_that_began_after_they_asked() -> None:
    made: set[int] = set()
    durable: set[int] = set()
    count = 0

    def sync() -> None:
        nonlocal count
        count += 1
        seen = set(made)
        threading.Event().wait(0.001)
        durable.update(seen)

    group = GroupSync(sync)

    def make(number: int) -> bool:
        made.add(number)
        group.wait()
        return number in durable

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(make, range(200)))
    assert count < 200, "no two of them shared a sync"


def test_a_failed_sync_lets_nobody_go_on() -> None:
    begun, go_on = threading.Event(), threading.Event()
    failures = [OSError("first"), OSError("second")]

    def sync() -> None:
        begun.set()
        go_on.wait(10)
        raise failures.pop(0)

    group = GroupSync(sync)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(group.wait)
        assert begun.wait(10)
        second = threads.submit(group.wait)
        go_on.set()
        for waiting in (first, second):
            with pytest.raises(OSError, match=r"first|second"):
                waiting.result(10)
    assert not failures


def test_after_a_failure_the_next_one_syncs_again() -> None:
    outcomes: list[Exception | None] = [OSError("once"), None]

    def sync() -> None:
        outcome = outcomes.pop(0)
        if outcome is not None:
            raise outcome

    group = GroupSync(sync)
    with pytest.raises(OSError, match="once"):
        group.wait()
    group.wait()
    assert not outcomes
