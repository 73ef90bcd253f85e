"""Work in threads: a call is over only when nothing reads its memory any more."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from forkpoint.statestore.threads import run_in


async def test_a_cancelled_call_waits_for_work_that_has_begun() -> None:
    begun, let_go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        let_go.wait(30)
        ended.set()

    with ThreadPoolExecutor(1) as threads:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(run_in(threads, work))
            await asyncio.to_thread(begun.wait, 30)
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0.01)
            assert not task.done()
            let_go.set()
            await asyncio.wait([task])
        assert task.cancelled() and ended.is_set()


async def test_a_cancelled_call_drops_work_that_has_not_begun() -> None:
    let_go, did = threading.Event(), list[str]()
    with ThreadPoolExecutor(1) as threads:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(run_in(threads, lambda: let_go.wait(30)))
            await asyncio.sleep(0)
            second = group.create_task(run_in(threads, lambda: did.append("second")))
            await asyncio.sleep(0)
            second.cancel()
            await asyncio.wait([second])
            let_go.set()
            await first
    assert did == []


async def test_an_error_of_the_work_is_the_calls_error() -> None:
    def work() -> None:
        raise ValueError("no")

    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(ValueError, match="no"):
            await run_in(threads, work)
        assert await run_in(threads, lambda: 7) == 7
