"""Tier stacks: reads from wherever a blob is, writes as durable as they say, and faults that stay in their tier."""

import asyncio
from pathlib import Path

import pytest

from forkpoint.errors import BlobMissingError, StoreFullError, StoreUnavailableError
from forkpoint.parts import PartSpec
from forkpoint.statestore import promote
from forkpoint.statestore.blobs import Buffer
from forkpoint.statestore.codec import digest_of, encode
from forkpoint.statestore.fetch import fetch_ahead
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.heal import heal
from forkpoint.statestore.manifest import ManifestPart
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.lru import HostMemoryBlobs
from forkpoint.statestore.records import Durability
from forkpoint.statestore.tiers import Role, Tier, TieredBlobs, tiers_of
from forkpoint.statestore.wrappers.forward import ForwardingBlobs
from forkpoint.statestore.wrappers.meter import MeteredBlobs
from tests.support.faults import FaultyBlobs
from tests.support.store import ManualClock

RAW = b"the bytes of a part" * 100
DIGEST, FRAME = digest_of(RAW), encode(RAW)
OTHER = digest_of(b"other")
DOWN = StoreUnavailableError("tier", "down")


class Shared(ForwardingBlobs):
    """A durable store that another machine can read."""

    durability = Durability.REPLICATED
    survives_node = True


class Peers:
    """Other nodes that have some frames."""

    def __init__(self) -> None:
        self.frames: dict[str, bytes] = {}
        self.error: Exception | None = None
        self.closed = False

    async def open(self) -> None:
        pass

    async def get(self, digest: str) -> bytes:
        if self.error is not None:
            raise self.error
        if digest not in self.frames:
            raise BlobMissingError(digest)
        return self.frames[digest]

    async def close(self) -> None:
        self.closed = True


class Stack:
    """Host memory, a local store, a shared one, peers; each of the first three can be spoilt."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.cache = FaultyBlobs(HostMemoryBlobs(1 << 20))
        self.local = FaultyBlobs(MemoryBlobs())
        self.shared = FaultyBlobs(Shared(MemoryBlobs()))
        self.peers = Peers()
        tiers = (Tier("host", self.cache, Role.CACHE), Tier("local", self.local), Tier("shared", self.shared))
        self.blobs = TieredBlobs(tiers, [self.peers], self.clock, cache_seconds=0.05)

    async def where(self) -> tuple[str, ...]:
        await self.blobs.settle()
        return await self.blobs.where(DIGEST)


@pytest.fixture
async def stack() -> Stack:
    made = Stack()
    await made.blobs.open()
    return made


async def test_a_write_reaches_every_durable_tier_and_the_cache_behind_it(stack: Stack) -> None:
    assert await stack.blobs.put(DIGEST, FRAME)
    assert await stack.blobs.has(DIGEST)
    assert await stack.where() == ("host", "local", "shared")
    assert not await stack.blobs.put(DIGEST, FRAME)
    assert (stack.blobs.durability, stack.blobs.survives_node) == (Durability.REPLICATED, True)
    assert await stack.blobs.sizes([DIGEST, OTHER]) == [len(FRAME), None]


@pytest.mark.parametrize("tier", ["local", "shared"])
async def test_a_write_that_misses_a_durable_tier_fails_and_the_next_one_completes_it(stack: Stack, tier: str) -> None:
    spoilt: FaultyBlobs = getattr(stack, tier)
    for error in (DOWN, StoreFullError("tier", "full")):
        spoilt.errors["put"] = error
        with pytest.raises(type(error)):
            await stack.blobs.put(DIGEST, FRAME)
        assert not await stack.blobs.has(DIGEST), "a manifest may not name it yet"
    spoilt.errors.clear()
    assert await stack.blobs.put(DIGEST, FRAME)
    assert await stack.blobs.has(DIGEST)
    assert await stack.where() == ("host", "local", "shared")


@pytest.mark.parametrize("method", ["put", "get", "has", "replace", "delete", "open"])
async def test_a_cache_that_fails_fails_no_call(method: str) -> None:
    stack = Stack()
    stack.cache.errors[method] = DOWN
    if method == "open":
        stack.cache.open = failing  # type: ignore[method-assign]
    await stack.blobs.open()
    assert await stack.blobs.put(DIGEST, FRAME)
    await stack.blobs.settle()
    stack.clock.now_us += 60_000_000
    assert await stack.blobs.get(DIGEST) == FRAME
    await stack.blobs.replace(DIGEST, FRAME)
    assert await stack.blobs.has(DIGEST)
    assert "local" in await stack.where()
    await stack.blobs.delete([DIGEST])
    assert not await stack.blobs.has(DIGEST)
    assert stack.blobs.cache_failures["host"] > 0
    assert stack.blobs.broken is None


async def failing() -> None:
    raise DOWN


async def test_a_cache_that_could_not_be_opened_is_opened_once_it_can_be() -> None:
    class Closed(FaultyBlobs):
        opened = 0

        async def open(self) -> None:
            self.opened += 1
            if self.opened == 1:
                raise DOWN

    clock, cache = ManualClock(), Closed(HostMemoryBlobs(1 << 20))
    blobs = TieredBlobs([Tier("host", cache, Role.CACHE), Tier("local", MemoryBlobs())], clock=clock)
    await blobs.open()
    await blobs.put(DIGEST, FRAME)
    await blobs.settle()
    assert cache.calls == {}
    clock.now_us += 1_000_000
    for _ in range(2):
        assert await blobs.get(DIGEST) == FRAME
        await blobs.settle()
    assert (cache.opened, cache.calls["put"], cache.calls["get"]) == (2, 1, 2)


async def test_a_cache_that_stalls_is_waited_for_once_and_then_rests(stack: Stack) -> None:
    await stack.local.put(DIGEST, FRAME)
    stalled = 0

    async def stall(digest: str) -> bytes:
        nonlocal stalled
        stalled += 1
        await asyncio.Event().wait()
        return b""

    stack.cache.get = stall  # type: ignore[method-assign]
    for _ in range(5):
        assert await stack.blobs.get(DIGEST) == FRAME
    assert stalled == 1
    await stack.blobs.settle()
    stack.clock.now_us += 1_000_000
    assert await stack.blobs.get(DIGEST) == FRAME
    await stack.blobs.settle()
    stack.clock.now_us += 1_000_000
    assert await stack.blobs.get(DIGEST) == FRAME
    assert stalled == 2, "the second rest is twice as long"


async def test_a_cache_that_stalls_at_writes_delays_none(stack: Stack) -> None:
    entered = asyncio.Event()

    async def stall(digest: str, *pieces: Buffer) -> bool:
        entered.set()
        await asyncio.Event().wait()
        return True

    stack.cache.put = stall  # type: ignore[method-assign]
    data = bytearray(FRAME)
    assert await stack.blobs.put(DIGEST, memoryview(data))
    data[:] = bytes(len(data))
    await entered.wait()
    assert await stack.blobs.get(DIGEST) == FRAME
    await stack.blobs.close()


@pytest.mark.parametrize("source", ["local", "shared", "peers"])
async def test_a_read_brings_the_blob_into_the_tiers_before(stack: Stack, source: str) -> None:
    if source == "peers":
        stack.peers.frames[DIGEST] = FRAME
    else:
        await getattr(stack, source).put(DIGEST, FRAME)
    assert await stack.blobs.get(DIGEST) == FRAME
    expected = {"local": ("host", "local"), "shared": ("host", "local", "shared"), "peers": ("host", "local", "shared")}
    assert await stack.where() == expected[source]
    before = dict(stack.local.calls)
    assert await stack.blobs.get(DIGEST) == FRAME
    assert stack.local.calls.get("get") == before.get("get"), "the cache has it now"


@pytest.mark.parametrize("source", ["local", "shared", "peers"])
async def test_damage_is_not_brought_into_other_tiers(stack: Stack, source: str) -> None:
    damaged = FRAME[:-1] + bytes([FRAME[-1] ^ 1])
    if source == "peers":
        stack.peers.frames[DIGEST] = damaged
    else:
        await getattr(stack, source).put(DIGEST, damaged)
    assert await stack.blobs.get(DIGEST) == damaged
    assert await stack.where() == (() if source == "peers" else (source,))


async def test_what_no_tier_has_is_missing_and_what_can_not_be_asked_for_is_not(stack: Stack) -> None:
    with pytest.raises(BlobMissingError):
        await stack.blobs.get(DIGEST)
    for spoilt in (stack.local, stack.shared):
        spoilt.errors["get"] = DOWN
        with pytest.raises(StoreUnavailableError):
            await stack.blobs.get(DIGEST)
        spoilt.errors.clear()
    stack.peers.error = DOWN
    with pytest.raises(StoreUnavailableError):
        await stack.blobs.get(DIGEST)
    stack.cache.errors["get"] = DOWN
    stack.peers.error = None
    with pytest.raises(BlobMissingError):
        await stack.blobs.get(DIGEST)


async def test_a_read_goes_on_to_the_next_tier_when_one_is_out_of_reach(stack: Stack) -> None:
    await stack.blobs.put(DIGEST, FRAME)
    await stack.blobs.settle()
    stack.cache.errors["get"] = stack.local.errors["get"] = DOWN
    assert await stack.blobs.get(DIGEST) == FRAME
    stack.shared.errors["get"] = DOWN
    stack.peers.frames[DIGEST] = FRAME
    assert await stack.blobs.get(DIGEST) == FRAME


async def test_what_can_not_be_promoted_stays_where_it_is(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    await stack.shared.put(DIGEST, FRAME)
    stack.local.errors["put"] = StoreFullError("local", "full")
    stack.cache.errors["put"] = DOWN
    assert await stack.blobs.get(DIGEST) == FRAME
    assert await stack.where() == ("shared",)
    monkeypatch.setattr(promote, "PENDING_BYTES_MAX", 1)
    await stack.shared.put(OTHER, encode(b"other"))
    stack.local.errors.clear()
    for digest in (DIGEST, OTHER):
        await stack.blobs.get(digest)
    await stack.blobs.settle()
    assert (await stack.local.has(DIGEST), await stack.local.has(OTHER)) == (True, False)


async def test_the_stack_is_broken_when_a_durable_tier_is(stack: Stack) -> None:
    class Broken(ForwardingBlobs):
        broken = "a sync failed"

    tiers = [Tier("host", Broken(MemoryBlobs()), Role.CACHE), Tier("local", MemoryBlobs())]
    assert TieredBlobs(tiers).broken is None
    assert TieredBlobs([*tiers, Tier("shared", Broken(MemoryBlobs()))]).broken == "shared: a sync failed"


async def test_blobs_are_listed_and_deleted_in_all_durable_tiers(stack: Stack) -> None:
    await stack.blobs.put(DIGEST, FRAME)
    await stack.shared.put(OTHER, FRAME)
    await stack.blobs.settle()
    assert sorted([digest async for digest in stack.blobs.digests()]) == sorted([DIGEST, DIGEST, OTHER])
    await stack.blobs.delete([DIGEST, OTHER])
    assert [digest async for digest in stack.blobs.digests()] == []
    assert await stack.where() == ()
    assert [tier.label for tier in tiers_of(MeteredBlobs(stack.blobs))] == ["host", "local", "shared"]
    assert [tier.blobs for tier in tiers_of(stack.shared)] == [stack.shared]


async def test_a_damaged_copy_is_read_from_another_tier_and_healed(stack: Stack) -> None:
    part = ManifestPart(PartSpec("p", "uint8", (len(RAW),)), DIGEST)
    await stack.blobs.put(DIGEST, FRAME)
    await stack.blobs.settle()
    for spoilt in (stack.cache, stack.local):
        await spoilt.replace(DIGEST, FRAME[:-1] + bytes([FRAME[-1] ^ 1]))
    outer = MeteredBlobs(stack.blobs)
    assert [bytes(raw) async for _, raw in fetch_ahead(outer, [part]) if not isinstance(raw, Exception)] == [RAW]
    for tier in stack.blobs.tiers:
        assert await tier.blobs.get(DIGEST) == FRAME


async def test_a_copy_that_is_whole_nowhere_is_not_healed(stack: Stack) -> None:
    await stack.blobs.put(DIGEST, b"nonsense")
    assert await heal(stack.blobs, DIGEST) is None
    stack.peers.frames[DIGEST] = FRAME
    stack.local.errors["replace"] = DOWN
    assert await heal(stack.blobs, DIGEST, len(RAW)) == RAW
    assert await stack.shared.get(DIGEST) == FRAME
    assert await stack.local.get(DIGEST) == b"nonsense", "it could not be reached"
    assert await heal(MemoryBlobs(), DIGEST) is None


async def test_a_write_that_fails_in_one_tier_is_over_in_the_others_too(stack: Stack) -> None:
    writing, go = asyncio.Event(), asyncio.Event()
    put = stack.shared.put

    async def slow(digest: str, *pieces: Buffer) -> bool:
        writing.set()
        await go.wait()
        return await put(digest, *pieces)

    stack.shared.put = slow  # type: ignore[method-assign]
    stack.local.errors["put"] = DOWN
    async with asyncio.TaskGroup() as group:
        task = group.create_task(outcome(stack))
        await writing.wait()
        assert not task.done(), "the caller's memory is still being read"
        go.set()
        assert isinstance(await task, StoreUnavailableError)
    assert await stack.shared.has(DIGEST)


async def outcome(stack: Stack) -> Exception | bool:
    try:
        return await stack.blobs.put(DIGEST, FRAME)
    except StoreUnavailableError as error:
        return error


async def test_closing_closes_all_and_drops_what_was_under_way(stack: Stack) -> None:
    await stack.shared.put(DIGEST, FRAME)
    await stack.blobs.get(DIGEST)
    await stack.blobs.close()
    await stack.blobs.close()
    assert stack.peers.closed
    for call in (stack.blobs.get(DIGEST), stack.blobs.has(DIGEST), stack.local.has(DIGEST)):
        with pytest.raises(StoreUnavailableError):
            await call


def test_a_stack_needs_a_durable_tier_and_labels_of_its_own() -> None:
    with pytest.raises(ValueError, match="durable tier"):
        TieredBlobs([Tier("host", MemoryBlobs(), Role.CACHE)])
    with pytest.raises(ValueError, match="labels"):
        TieredBlobs([Tier("a", MemoryBlobs()), Tier("a", MemoryBlobs())])


async def test_files_in_front_of_a_shared_store_are_both_written(tmp_path: Path) -> None:
    files, shared = FileBlobs(tmp_path), MemoryBlobs()
    blobs = TieredBlobs([Tier("local", files), Tier("shared", shared)])
    await blobs.put(DIGEST, FRAME[:10], memoryview(FRAME)[10:])
    assert await files.get(DIGEST) == await shared.get(DIGEST) == FRAME
    assert blobs.durability is Durability.LOCAL_FSYNC
    assert blobs.tier == f"{files.tier}+{shared.tier}"
    await blobs.close()
