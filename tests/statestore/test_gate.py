"""The gate: what is in flight is bounded, and nobody is passed over or forgotten."""

import asyncio
import random

import pytest

from forkpoint.statestore.gate import Gate


class Crowd:
    """Holders of a gate: who is inside, and in which order they came in."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.inside: dict[int, int] = {}
        self.order: list[int] = []
        self.leave = {number: asyncio.Event() for number in range(50)}

    async def hold(self, number: int, nbytes: int) -> None:
        async with self.gate.hold(nbytes):
            self.inside[number] = nbytes
            self.order.append(number)
            try:
                await self.leave[number].wait()
            finally:
                del self.inside[number]


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_calls_and_bytes_are_bounded_and_the_first_to_come_is_the_first_in() -> None:
    crowd = Crowd(Gate(3, 100))
    async with asyncio.TaskGroup() as group:
        for number, nbytes in enumerate((40, 40, 40, 1, 1)):
            group.create_task(crowd.hold(number, nbytes))
        await turns()
        assert (crowd.order, crowd.gate.waiting) == ([0, 1], 3), "a small one does not slip past a large one"
        crowd.leave[0].set()
        await turns()
        assert (crowd.order, crowd.gate.waiting) == ([0, 1, 2, 3], 1), "three calls at most"
        for number in range(1, 5):
            crowd.leave[number].set()
    assert crowd.order == [0, 1, 2, 3, 4]


async def test_what_is_larger_than_the_gate_goes_in_alone() -> None:
    crowd = Crowd(Gate(3, 100))
    async with asyncio.TaskGroup() as group:
        for number, nbytes in enumerate((1, 1000, 1)):
            group.create_task(crowd.hold(number, nbytes))
        await turns()
        assert crowd.order == [0]
        crowd.leave[0].set()
        await turns()
        assert crowd.order == [0, 1]
        crowd.leave[1].set()
        crowd.leave[2].set()
    assert crowd.order == [0, 1, 2]


async def test_cancelled_at_any_moment_a_gate_stays_whole() -> None:
    rng = random.Random(3)
    crowd = Crowd(Gate(4, 100))
    async with asyncio.TaskGroup() as group:
        tasks = {number: group.create_task(crowd.hold(number, rng.randrange(150))) for number in range(50)}
        for _ in range(200):
            number = rng.randrange(50)
            if rng.random() < 0.5:
                tasks[number].cancel()
            else:
                crowd.leave[number].set()
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
            assert len(crowd.inside) <= 4
            assert sum(crowd.inside.values()) <= 100 or len(crowd.inside) == 1
        for event in crowd.leave.values():
            event.set()
    assert (crowd.inside, crowd.gate.waiting) == ({}, 0)
    async with crowd.gate.hold(100), asyncio.timeout(5):
        assert crowd.gate.waiting == 0


async def test_one_that_is_cancelled_as_it_is_let_in_leaves_no_trace() -> None:
    crowd = Crowd(Gate(1, 100))
    async with asyncio.TaskGroup() as group:
        group.create_task(crowd.hold(0, 1))
        await turns()
        second = group.create_task(crowd.hold(1, 1))
        third = group.create_task(crowd.hold(2, 1))
        await turns()
        crowd.leave[0].set()
        await asyncio.sleep(0)
        second.cancel()
        await turns()
        assert crowd.order == [0, 2]
        crowd.leave[2].set()
        await third


def test_a_gate_that_lets_nothing_in_is_refused() -> None:
    for calls, nbytes in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="at least one"):
            Gate(calls, nbytes)
