"""Tier stacks under faults at random, against a short model: what was acknowledged is there, and no read lies."""

import asyncio
import contextlib
import os
import random

import pytest

from forkpoint.errors import BlobMissingError, ForkpointError, StoreFullError, StoreUnavailableError
from forkpoint.parts import PartSpec
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.codec import digest_of, encode
from forkpoint.statestore.fetch import fetch_ahead
from forkpoint.statestore.manifest import ManifestPart
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.lru import HostMemoryBlobs
from forkpoint.statestore.tiers import Role, Tier, TieredBlobs
from forkpoint.statestore.wrappers.faults import FaultInjectingBlobs, FaultRates
from forkpoint.statestore.wrappers.retry import Backoff, RetryingBlobs
from tests.support.store import ManualClock

RAWS = [os.urandom(200) for _ in range(12)]
PARTS = [ManifestPart(PartSpec(f"p{index}", "uint8", (200,)), digest_of(raw)) for index, raw in enumerate(RAWS)]
FAULTS = FaultRates(before=0.15, after=0.1, full=0.1, damage=0.0)
NOISY = FaultRates(before=0.15, after=0.1, full=0.1, damage=0.2)


class Run:
    """A stack whose every tier fails now and then, and what must be true of it: `stored` is there, `gone` is not, and
    of the others nobody knows."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.inner: list[BlobStore] = [HostMemoryBlobs(1000), MemoryBlobs(), MemoryBlobs()]
        self.faulty = [FaultInjectingBlobs(blobs, FaultRates(), seed + index) for index, blobs in enumerate(self.inner)]
        self.stack = TieredBlobs(
            [
                Tier("host", self.faulty[0], Role.CACHE),
                Tier("local", self.faulty[1]),
                Tier("shared", RetryingBlobs(self.faulty[2], Backoff(tries=2, first_seconds=0.0))),
            ],
            clock=self.clock,
        )
        self.stored, self.gone = set[int](), set[int](range(len(RAWS)))

    async def begin(self) -> "Run":
        """Open it, then let it fail."""
        await self.stack.open()
        for index, faulty in enumerate(self.faulty):
            faulty.rates = NOISY if index == 0 else FAULTS
        return self

    async def step(self) -> None:
        """One call, and what it tells."""
        number = self.rng.randrange(len(RAWS))
        calls = (self.put, self.put, self.read, self.read, self.has, self.delete)
        self.clock.now_us += self.rng.choice((0, 0, 500_000, 5_000_000))
        with contextlib.suppress(StoreUnavailableError, StoreFullError):
            await self.rng.choice(calls)(number)

    async def put(self, number: int) -> None:
        self.gone.discard(number)
        await self.stack.put(PARTS[number].digest, encode(RAWS[number]))
        self.stored.add(number)

    async def read(self, number: int) -> None:
        async for _, raw in fetch_ahead(self.stack, [PARTS[number]]):
            if isinstance(raw, BlobMissingError):
                assert number not in self.stored
            elif not isinstance(raw, ForkpointError):
                assert raw == RAWS[number]

    async def has(self, number: int) -> None:
        if await self.stack.has(PARTS[number].digest):
            assert number not in self.gone
            assert all([await blobs.has(PARTS[number].digest) for blobs in self.inner[1:]])
        else:
            assert number not in self.stored

    async def delete(self, number: int) -> None:
        await self.stack.settle()  # a promotion under way would bring it back, as a collector knows
        self.stored.discard(number)
        await self.stack.delete([PARTS[number].digest])
        for blobs in self.inner:
            await blobs.delete([PARTS[number].digest])
        self.gone.add(number)


@pytest.mark.parametrize("seed", range(20))
async def test_what_was_acknowledged_is_there_whatever_failed(seed: int) -> None:
    run = await Run(seed).begin()
    for _ in range(300):
        await run.step()
    await run.stack.settle()
    for faulty in run.faulty:
        faulty.rates = FaultRates()
    run.clock.now_us += 100_000_000
    assert run.stored, "some writes got through"
    for number in run.stored:
        assert await run.stack.has(PARTS[number].digest)
        async for _, raw in fetch_ahead(run.stack, [PARTS[number]]):
            assert raw == RAWS[number]
    assert sum(faulty.injected for faulty in run.faulty) > 100
    await run.stack.close()


async def test_calls_at_once_keep_the_same_promises() -> None:
    run = await Run(99).begin()
    for number in range(len(RAWS)):
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(quietly(run, number))
    for faulty in run.faulty:
        faulty.rates = FaultRates()
    run.clock.now_us += 100_000_000
    for number in run.stored:
        assert await run.stack.has(PARTS[number].digest)
        assert await run.stack.get(PARTS[number].digest) == encode(RAWS[number])
    await run.stack.close()


async def quietly(run: Run, number: int) -> None:
    for call in (run.put, run.read, run.has):
        try:
            await call(number)
        except (StoreUnavailableError, StoreFullError):
            continue
