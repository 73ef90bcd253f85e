"""Wrappers: retry, limit, meter and fault injection change how calls go, and never what they mean."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest

from forkpoint.errors import BlobMissingError, StoreFullError, StoreUnavailableError
from forkpoint.statestore.codec import digest_of
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.lru import HostMemoryBlobs
from forkpoint.statestore.wrappers.faults import FaultInjectingBlobs, FaultRates
from forkpoint.statestore.wrappers.forward import ForwardingBlobs, innermost
from forkpoint.statestore.wrappers.limit import LimitedBlobs
from forkpoint.statestore.wrappers.meter import MeteredBlobs
from forkpoint.statestore.wrappers.retry import Backoff, RetryingBlobs
from tests.support.faults import FaultyBlobs
from tests.support.store import ManualClock

ONE, TWO, THREE, FOUR = (digest_of(bytes([index])) for index in range(4))
CALLS: dict[str, Callable[[ForwardingBlobs], Awaitable[object]]] = {
    "open": lambda blobs: blobs.open(),
    "put": lambda blobs: blobs.put(ONE, b"x"),
    "get": lambda blobs: blobs.get(TWO),
    "has": lambda blobs: blobs.has(TWO),
    "replace": lambda blobs: blobs.replace(ONE, b"y"),
    "delete": lambda blobs: blobs.delete([THREE]),
    "fence": lambda blobs: blobs.fence(0),
    "sizes": lambda blobs: blobs.sizes([TWO]),
}
DOWN = StoreUnavailableError("blobs", "down")


class Naps:
    """A sleep that takes no time and is noted."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.seconds.append(seconds)


class Failing(ForwardingBlobs):
    """A store whose next `failures` calls raise `error`."""

    def __init__(self, failures: int, error: Exception = DOWN) -> None:
        super().__init__(MemoryBlobs())
        self.failures, self.error = failures, error
        self.is_broken: str | None = None

    @property
    def broken(self) -> str | None:
        return self.is_broken

    def __getattribute__(self, name: str) -> object:
        if name in CALLS and object.__getattribute__(self, "failures"):
            self.failures -= 1

            async def fail(*_: object) -> None:
                raise self.error

            return fail
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("method", CALLS)
async def test_a_call_that_could_not_be_taken_is_made_again(method: str) -> None:
    naps, failing = Naps(), Failing(3)
    await failing.inner.put(TWO, b"two")
    blobs = RetryingBlobs(failing, Backoff(tries=4, first_seconds=1, most_seconds=3), random.Random(1), naps)
    await CALLS[method](blobs)
    assert blobs.retries == 3
    assert [most / 2 <= nap <= most for nap, most in zip(naps.seconds, (1, 2, 3), strict=True)] == [True] * 3


@pytest.mark.parametrize("method", CALLS)
async def test_after_so_many_tries_the_error_is_the_callers(method: str) -> None:
    naps, failing = Naps(), Failing(3)
    blobs = RetryingBlobs(failing, Backoff(tries=3), sleep=naps)
    with pytest.raises(StoreUnavailableError, match="down"):
        await CALLS[method](blobs)
    assert (failing.failures, len(naps.seconds)) == (0, 2)


async def test_only_what_passes_by_itself_is_tried_again() -> None:
    naps = Naps()
    for error in (StoreFullError("blobs", "full"), BlobMissingError(ONE), ValueError("no")):
        with pytest.raises(type(error)):
            await RetryingBlobs(Failing(1, error), sleep=naps).put(ONE, b"x")
    broken = Failing(9)
    broken.is_broken = "a sync failed"
    with pytest.raises(StoreUnavailableError):
        await RetryingBlobs(broken, sleep=naps).put(ONE, b"x")
    closed = RetryingBlobs(Failing(0), sleep=naps)
    await closed.close()
    with pytest.raises(StoreUnavailableError):
        await closed.put(ONE, b"x")
    assert naps.seconds == []


async def test_a_put_whose_answer_was_lost_is_stored_once() -> None:
    inner = MemoryBlobs()
    faulty = FaultInjectingBlobs(inner, FaultRates(after=1.0))
    blobs = RetryingBlobs(faulty, Backoff(tries=3), sleep=Naps())
    with pytest.raises(StoreUnavailableError):
        await blobs.put(ONE, b"x")
    faulty.rates = FaultRates()
    assert not await blobs.put(ONE, b"y")
    assert await blobs.get(ONE) == b"x"


async def test_calls_that_failed_together_do_not_come_back_together() -> None:
    backoff = Backoff(first_seconds=1.0, most_seconds=8.0)
    assert [backoff.pause(failures, 0.0) for failures in (1, 2, 3, 4, 50)] == [1, 2, 4, 8, 8]
    assert [backoff.pause(1, jitter) for jitter in (0.0, 0.5, 1.0)] == [1.0, 0.75, 0.5]


class Counting(ForwardingBlobs):
    """Notes how many calls and bytes are inside at once."""

    def __init__(self) -> None:
        super().__init__(MemoryBlobs())
        self.inside = self.most = self.bytes = self.most_bytes = 0

    async def put(self, digest: str, *pieces: bytes | bytearray | memoryview) -> bool:
        self.inside, self.bytes = self.inside + 1, self.bytes + len(pieces[0])
        self.most, self.most_bytes = max(self.most, self.inside), max(self.most_bytes, self.bytes)
        for _ in range(5):
            await asyncio.sleep(0)
        self.inside, self.bytes = self.inside - 1, self.bytes - len(pieces[0])
        return await super().put(digest, *pieces)


@pytest.mark.parametrize(("calls_max", "bytes_max"), [(3, 10_000), (100, 250)])
async def test_no_more_calls_and_bytes_than_allowed_are_inside(calls_max: int, bytes_max: int) -> None:
    counting = Counting()
    blobs = LimitedBlobs(counting, calls_max, bytes_max)
    async with asyncio.TaskGroup() as group:
        for index in range(20):
            group.create_task(blobs.put(digest_of(bytes([index])), bytes(100)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert blobs.waiting > 0
    assert counting.most == (3 if calls_max == 3 else 2)
    assert counting.most_bytes <= bytes_max
    assert len([digest async for digest in blobs.digests()]) == 20


async def test_calls_bytes_and_seconds_are_counted_by_method() -> None:
    clock, faulty = ManualClock(), FaultyBlobs(MemoryBlobs())
    blobs = MeteredBlobs(faulty, clock)
    await blobs.put(ONE, b"abc", b"de")
    await blobs.put(ONE, b"abc", b"de")
    await blobs.replace(ONE, b"abcdefg")
    assert await blobs.get(ONE) == b"abcdefg"
    for _ in range(2):
        with pytest.raises(BlobMissingError):
            await blobs.get(TWO)
    faulty.errors["put"] = DOWN
    with pytest.raises(StoreUnavailableError):
        await blobs.put(TWO, b"x")
    totals = blobs.totals()
    assert {method: (t.calls, t.failures, t.missing, t.bytes) for method, t in totals.items()} == {
        "put": (3, 1, 0, 5),
        "replace": (1, 0, 0, 7),
        "get": (3, 0, 2, 7),
    }
    totals["put"].calls = 99
    assert blobs.totals()["put"].calls == 3, "what was handed out is a copy"


async def test_seconds_add_up_and_the_longest_call_is_kept() -> None:
    clock = ManualClock()

    class Slow(ForwardingBlobs):
        async def has(self, digest: str) -> bool:
            clock.now_us += 2_000_000 if digest == ONE else 500_000
            return await super().has(digest)

    blobs = MeteredBlobs(Slow(MemoryBlobs()), clock)
    await blobs.has(ONE)
    await blobs.has(TWO)
    assert (blobs.totals()["has"].seconds, blobs.totals()["has"].most_seconds) == (2.5, 2.0)


async def test_a_seed_gives_the_same_faults_again() -> None:
    async def story(seed: int) -> list[str]:
        blobs = FaultInjectingBlobs(MemoryBlobs(), FaultRates(before=0.2, after=0.2, full=0.2, damage=0.5), seed)
        await blobs.inner.put(TWO, b"two")
        told = []
        for index in range(60):
            try:
                told.append(repr(await CALLS[("put", "get", "delete")[index % 3]](blobs)))
            except (StoreUnavailableError, StoreFullError) as error:
                told.append(str(error))
        return told

    assert await story(1) == await story(1) != await story(2)


async def test_each_fault_does_what_its_name_says() -> None:
    inner = MemoryBlobs()
    blobs = FaultInjectingBlobs(inner, FaultRates(before=1.0))
    with pytest.raises(StoreUnavailableError):
        await blobs.put(ONE, b"x")
    assert not await inner.has(ONE)
    blobs.rates = FaultRates(after=1.0)
    with pytest.raises(StoreUnavailableError):
        await blobs.put(ONE, b"x")
    assert await inner.has(ONE)
    blobs.rates = FaultRates(full=1.0)
    for call in (blobs.put(TWO, b"x"), blobs.replace(TWO, b"x")):
        with pytest.raises(StoreFullError):
            await call
    assert await blobs.has(ONE) and not await inner.has(TWO), "reading needs no room"
    blobs.rates = FaultRates(damage=1.0)
    await inner.put(THREE, bytes(100))
    assert sum(byte.bit_count() for byte in await blobs.get(THREE)) == 1
    assert await inner.get(THREE) == bytes(100)
    await inner.put(FOUR, b"")
    assert await blobs.get(FOUR) == b""
    assert blobs.injected == 5


async def test_host_memory_keeps_what_was_used_last_within_its_budget() -> None:
    blobs = HostMemoryBlobs(100)
    for digest in (ONE, TWO):
        assert await blobs.put(digest, bytes(20), memoryview(bytes(20)))
    assert await blobs.get(ONE) == bytes(40)
    assert await blobs.put(THREE, bytes(40))
    assert [await blobs.has(digest) for digest in (ONE, TWO, THREE)] == [True, False, True]
    assert blobs.used_bytes == 80
    await blobs.put(FOUR, bytes(101))
    assert not await blobs.has(FOUR) and blobs.used_bytes == 80, "what can't fit drives nothing out"
    await blobs.replace(ONE, bytes(60))
    assert await blobs.sizes([ONE, TWO, THREE]) == [60, None, 40]
    await blobs.replace(ONE, bytes(61))
    assert (await blobs.sizes([ONE, THREE]), blobs.used_bytes) == ([61, None], 61)
    await blobs.delete([ONE, TWO])
    assert blobs.used_bytes == 0
    with pytest.raises(ValueError, match="at least one byte"):
        HostMemoryBlobs(0)


async def test_host_memory_holds_a_copy_of_memory_that_changes() -> None:
    blobs, data = HostMemoryBlobs(100), bytearray(b"before")
    await blobs.put(ONE, memoryview(data))
    data[:] = b"after!"
    assert await blobs.get(ONE) == b"before"


def test_the_innermost_store_is_found() -> None:
    inner = MemoryBlobs()
    assert innermost(MeteredBlobs(RetryingBlobs(LimitedBlobs(inner)))) is inner
    assert innermost(inner) is inner
