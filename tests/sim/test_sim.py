"""Some hundred runs of the simulation, and proof that a seed is a run. More of them: `make sim SEEDS=10000`."""

import asyncio
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

from forkpoint.errors import NotFoundError
from forkpoint.statestore.records import Durability, WorkflowRow
from tests.sim.loop import SimLoop, StuckError
from tests.sim.process import Condition, Process
from tests.sim.store import SimStore
from tests.sim.trace import Trace
from tests.sim.watch import Call
from tests.sim.world import run_seed

ROOT = Path(__file__).resolve().parents[2]
SEEDS = 40
MORE_SEEDS = 300
FOUND = (6622, 6878, 6908, 7652, 7955, 2398, 822, 5031, 20018, 30974, 40221, 50180)
"""Seeds beyond those that found mistakes."""


def loop(seed: int = 0) -> SimLoop:
    return SimLoop(random.Random(seed))  # type: ignore[abstract]


def runs(seeds: Iterable[int]) -> Counter[str]:
    """What happened in them, all of which went well."""
    totals = Counter[str]()
    for seed in seeds:
        outcome = run_seed(seed)
        assert outcome.problem is None, f"python -m tests.sim --seed {seed}: {outcome.problem}"
        totals.update(outcome.counts)
    return totals


def test_every_promise_holds_in_every_run() -> None:
    totals = runs((*range(SEEDS), *FOUND))
    evils = ("kill", "freeze", "stop", "partition", "part", "outage", "storm", "hiccup", "failovers", "losses")
    events = ("resyncs", "moved", "unmoved", "minds changed")
    assert [what for what in (*evils, *events) if totals[what] == 0] == [], "the runs are too tame"
    assert totals["tokens"] > 20 * SEEDS and totals["operations"] > 5 * SEEDS and totals["sights"] > SEEDS


def test_every_promise_holds_in_some_hundred_runs_more() -> None:
    assert runs(range(SEEDS, SEEDS + MORE_SEEDS))["tokens"] > 20 * MORE_SEEDS


def digests(hash_seed: str, first: int, count: int) -> str:
    """What runs come to in a process of their own."""
    command = [sys.executable, "-m", "tests.sim", "--digests", "--first", str(first), "--seeds", str(count)]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(("src", "."))}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout


def test_a_seed_is_the_same_run_in_any_process() -> None:
    once, again = digests("1", 20, 8), digests("2", 20, 8)
    assert once == again
    assert len(set(once.splitlines())) == 8


def test_nobody_is_told_what_a_failover_can_take_back() -> None:
    async def story() -> None:
        own = asyncio.get_running_loop()
        store = SimStore(own, random.Random(1), Durability.REPLICATED, Trace(own.time))
        write = store.execute(Call("catalog", "create_workflow", (WorkflowRow("w"),)))
        read = store.execute(Call("catalog", "get_workflow", ("w",)))
        assert own.time() < write.ready == read.ready == store._writes[-1].replicated
        store.fail_over()
        assert not store.still_true(write) and not store.still_true(read)
        assert isinstance(store.execute(Call("catalog", "get_workflow", ("w",))).error, NotFoundError)

    loop().run(story(), 10)


def test_time_is_virtual_and_passes_only_while_all_wait() -> None:
    async def story() -> list[float]:
        now = asyncio.get_running_loop().time
        await asyncio.gather(asyncio.sleep(3600), asyncio.to_thread(lambda: None))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await asyncio.Event().wait()
        return [now()]

    assert loop().run(story(), 10_000) == [3610.0]


def test_a_run_that_hangs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    async def long() -> None:
        await asyncio.sleep(100)

    async def busy() -> None:
        while True:
            await asyncio.sleep(0)

    with pytest.raises(StuckError, match="everything waits"):
        loop().run(forever(), 10)
    with pytest.raises(StuckError, match=r"not done after 10\.0 virtual seconds"):
        loop().run(long(), 10)
    monkeypatch.setattr("tests.sim.loop.ROUNDS_MAX", 1000)
    with pytest.raises(StuckError, match="not done after 1000 rounds"):
        loop().run(busy(), 10)


def test_who_asks_for_less_time_than_a_clock_can_tell_gets_on() -> None:
    async def story() -> float:
        now = asyncio.get_running_loop().time
        await asyncio.sleep(50)
        for _ in range(100):
            await asyncio.sleep(1e-18)
        return now()

    assert loop().run(story(), 100) > 50


def test_tasks_take_turns_by_the_seed_and_other_callbacks_do_not() -> None:
    async def story() -> tuple[tuple[int, ...], tuple[int, ...]]:
        woken, called, go = list[int](), list[int](), asyncio.Event()

        async def wait(number: int) -> None:
            await go.wait()
            woken.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(wait(number))
            await asyncio.sleep(1)
            for number in range(6):
                asyncio.get_running_loop().call_soon(called.append, number)
            go.set()
        return tuple(woken), tuple(called)

    orders = [loop(seed).run(story(), 10) for seed in range(20)]
    assert orders == [loop(seed).run(story(), 10) for seed in range(20)]
    assert len({woken for woken, _ in orders}) > 10
    assert {called for _, called in orders} == {tuple(range(6))}


def test_a_stopped_process_does_nothing_until_it_is_let_go_on_and_a_killed_one_never() -> None:
    async def story() -> tuple[list[int], list[int]]:
        stopped, killed, ticks = Process("stopped"), Process("killed"), dict[str, list[int]]()

        async def tick(name: str) -> None:
            for second in range(5):
                ticks.setdefault(name, []).append(second)
                await asyncio.sleep(1)

        tasks = [process.spawn(tick(process.name)) for process in (stopped, killed)]
        await asyncio.sleep(1.5)
        stopped.condition = Condition.STOPPED
        killed.kill()
        await asyncio.sleep(60)
        held = list(ticks["stopped"])
        stopped.condition = Condition.RUNNING
        own = asyncio.get_running_loop()
        assert isinstance(own, SimLoop)
        own.release(stopped)
        assert await stopped.ends(tasks[0])
        assert not await killed.ends(tasks[1])
        assert held == [0, 1] and ticks["stopped"] == [0, 1, 2, 3, 4]
        killed.condition = Condition.RUNNING
        own.release(killed)
        tasks[1].cancel()
        return held, ticks["killed"]

    assert loop().run(story(), 1000) == ([0, 1], [0, 1])
