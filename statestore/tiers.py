"""TieredBlobs: host memory, local files, a shared store and other nodes, as one blob store.

A read takes the first tier that has the blob and brings it into those before. A write has reached every durable tier
when it succeeds and reaches the cache tiers behind it; what fails or stalls in one of those fails no call. Frames go
through as they are: whoever reads one verifies it, and statestore/heal.py puts a whole copy over damaged ones; only
what is brought into another tier is verified here.
"""

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeVar

from forkpoint.clock import Clock, SystemClock
from forkpoint.errors import BlobMissingError, ForkpointError, StoreUnavailableError
from forkpoint.statestore.blobs import BlobStore, Buffer, joined
from forkpoint.statestore.promote import Promoter
from forkpoint.statestore.records import Durability
from forkpoint.statestore.rest import Rest
from forkpoint.statestore.whole import is_whole
from forkpoint.statestore.wrappers.forward import innermost

T = TypeVar("T")

log = logging.getLogger(__name__)

CACHE_SECONDS: Final = 2.0
"""What a call waits for a cache tier at most; one that took longer rests for a while."""


class BlobSource(Protocol):
    """Where frames may be had and none is put: other nodes. Every BlobStore is one too."""

    async def open(self) -> None:
        """As BlobStore.open."""
        ...

    async def get(self, digest: str) -> bytes:
        """The frame. Raises BlobMissingError when nobody has it, StoreUnavailableError when nobody could be asked."""
        ...

    async def close(self) -> None:
        """Idempotent."""
        ...


class Role(Enum):
    """What a tier is for."""

    CACHE = "cache"
    """May forget, refuse or fail: it only makes reads faster."""
    DURABLE = "durable"
    """A blob is stored once it is here (and in every other durable tier)."""


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of a stack."""

    label: str
    """Unique in the stack."""
    blobs: BlobStore
    role: Role = Role.DURABLE


class TieredBlobs:
    """The port over tiers, the fastest first. See forkpoint.statestore.blobs.BlobStore. `sources` are read only, after
    all tiers. Collect the tiers one by one (tiers_of) or the stack as one place, never both: each has terms of its own.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        sources: Sequence[BlobSource] = (),
        clock: Clock | None = None,
        cache_seconds: float = CACHE_SECONDS,
    ) -> None:
        self.tiers = tuple(tiers)
        self._sources = tuple(sources)
        self._durable = tuple(tier for tier in self.tiers if tier.role is Role.DURABLE)
        self._caches = tuple(tier for tier in self.tiers if tier.role is Role.CACHE)
        if not self._durable:
            raise ValueError("a stack needs a durable tier")
        if len({tier.label for tier in self.tiers}) != len(self.tiers):
            raise ValueError("tiers of a stack need labels of their own")
        self._cache_seconds = cache_seconds
        self._rests = {tier.label: Rest(clock or SystemClock()) for tier in self._caches}
        self._opened = set[str]()
        """Caches that could be opened; the others are tried again with their next call."""
        self._promoter = Promoter()
        self._closed = False

    # --- what the stack is -------------------------------------------------------------------------------------
    @property
    def broken(self) -> str | None:
        return next((f"{t.label}: {cause}" for t in self._durable if (cause := t.blobs.broken) is not None), None)

    @property
    def durability(self) -> Durability:
        """The highest class among the durable tiers: a write has reached them all."""
        order = list(Durability)
        return max((tier.blobs.durability for tier in self._durable), key=order.index)

    @property
    def survives_node(self) -> bool:
        return any(tier.blobs.survives_node for tier in self._durable)

    @property
    def tier(self) -> str:
        return "+".join(tier.blobs.tier for tier in self._durable)

    @property
    def cache_failures(self) -> dict[str, int]:
        """Calls of each cache tier that failed or took too long; its calls failed by none of them."""
        return {label: rest.failures for label, rest in self._rests.items()}

    # --- the port ----------------------------------------------------------------------------------------------
    async def open(self) -> None:
        for tier in self._caches:
            await self._try_cache(tier, _nothing)
        for tier in self._durable:
            await tier.blobs.open()
        for source in self._sources:
            await source.open()

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        results = await self._write(lambda blobs: blobs.put(digest, *pieces))
        if self._caches:
            self._promote(digest, joined(pieces), self._caches, trusted=True)
        return any(results)

    async def replace(self, digest: str, *pieces: Buffer) -> None:
        frame = joined(pieces)  # caches that take too long are left to it, so it must be memory of our own
        await self._write(lambda blobs: blobs.replace(digest, frame))
        await self._tell_caches(lambda blobs: blobs.replace(digest, frame))

    async def get(self, digest: str) -> bytes:
        self._check_open()
        failed: StoreUnavailableError | None = None
        for index, tier in enumerate(self.tiers):
            try:
                frame = await self._get_from(tier, digest)
            except StoreUnavailableError as error:
                failed = error
                continue
            if frame is not None:
                self._promote(digest, frame, self.tiers[:index])
                return frame
        for source in self._sources:
            try:
                frame = await source.get(digest)
            except BlobMissingError:
                continue
            except StoreUnavailableError as error:
                failed = error
                continue
            self._promote(digest, frame, self.tiers)
            return frame
        raise failed or BlobMissingError(digest)

    async def has(self, digest: str) -> bool:
        """Whether every durable tier has it: else a put has something to do."""
        self._check_open()
        for tier in self._durable:
            if not await tier.blobs.has(digest):
                return False
        return True

    async def delete(self, digests: Sequence[str], term: int = 0) -> None:
        """From every tier; a cache that can't be reached may keep a copy, which harms nothing."""
        await self._write(lambda blobs: blobs.delete(digests, term))
        await self._tell_caches(lambda blobs: blobs.delete(digests, term))

    async def fence(self, term: int) -> None:
        await self._write(lambda blobs: blobs.fence(term))

    async def sizes(self, digests: Sequence[str]) -> list[int | None]:
        """Of one copy; None where no durable tier has one. What a tier holds in all is asked of that tier."""
        self._check_open()
        found = [await tier.blobs.sizes(digests) for tier in self._durable]
        sizes = [[size for size in column if size is not None] for column in zip(*found, strict=True)]
        return [max(known, default=None) for known in sizes]

    async def digests(self) -> AsyncIterator[str]:
        """All of all durable tiers: one that several have comes several times."""
        self._check_open()
        for tier in self._durable:
            async for digest in tier.blobs.digests():
                yield digest

    async def close(self) -> None:
        self._closed = True
        await self._promoter.close()
        for closed in (*(tier.blobs for tier in self.tiers), *self._sources):
            await closed.close()

    # --- beyond the port ---------------------------------------------------------------------------------------
    async def where(self, digest: str) -> tuple[str, ...]:
        """Labels of the tiers that have it now, as far as they can be asked."""
        held = list[str]()
        for tier in self.tiers:
            if tier.role is Role.CACHE:
                has = await self._try_cache(tier, functools.partial(tier.blobs.has, digest))
            else:
                try:
                    has = await tier.blobs.has(digest)
                except StoreUnavailableError:
                    has = False
            held += [tier.label] if has else []
        return tuple(held)

    async def copies(self, digest: str) -> AsyncIterator[tuple[Tier | None, bytes | None]]:
        """What each tier, then each source (None), has under the digest; None where it has none or can't be asked."""
        for tier in self.tiers:
            try:
                yield tier, await self._get_from(tier, digest)
            except StoreUnavailableError:
                yield tier, None
        for source in self._sources:
            try:
                yield None, await source.get(digest)
            except (BlobMissingError, StoreUnavailableError):
                yield None, None

    async def settle(self) -> None:
        """Until every promotion that was begun has ended."""
        await self._promoter.settle()

    # --- how ---------------------------------------------------------------------------------------------------
    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError("tiers", "they are closed")

    async def _get_from(self, tier: Tier, digest: str) -> bytes | None:
        """The tier's frame, or None. Raises StoreUnavailableError of a durable tier only."""
        if tier.role is Role.CACHE:
            return await self._try_cache(tier, lambda: tier.blobs.get(digest))
        try:
            return await tier.blobs.get(digest)
        except BlobMissingError:
            return None

    async def _write(self, call: Callable[[BlobStore], Awaitable[T]]) -> list[T]:
        """Make a call on every durable tier at once, wait for all, raise the first tier's error."""
        self._check_open()
        results, errors = list[T](), dict[int, Exception]()

        async def one(number: int, tier: Tier) -> None:
            try:
                results.append(await call(tier.blobs))
            except Exception as error:  # noqa: BLE001 - raised below, once no tier works on the caller's memory
                errors[number] = error

        async with asyncio.TaskGroup() as group:
            for number, tier in enumerate(self._durable):
                group.create_task(one(number, tier))
        if errors:
            raise errors[min(errors)]
        return results

    def _promote(self, digest: str, frame: bytes, tiers: Sequence[Tier], trusted: bool = False) -> None:
        """Bring a frame into tiers behind the call. One that came from elsewhere is verified first: damage must not
        spread, and a copy of it would hide the whole one behind it."""

        async def bring(tier: Tier) -> None:
            if tier.role is Role.CACHE:
                await self._try_cache(tier, lambda: tier.blobs.put(digest, frame))
                return
            try:
                await tier.blobs.put(digest, frame)
            except ForkpointError as error:
                log.warning("blob %s was not brought into %s: %s", digest, tier.label, error)

        async def bring_all() -> None:
            if trusted or await is_whole(digest, frame):
                for tier in tiers:
                    await bring(tier)

        if tiers:
            self._promoter.promote(digest, len(frame), bring_all)

    async def _tell_caches(self, call: Callable[[BlobStore], Awaitable[object]]) -> None:
        for tier in self._caches:
            await self._try_cache(tier, functools.partial(call, tier.blobs))

    async def _try_cache(self, tier: Tier, call: Callable[[], Awaitable[T]]) -> T | None:
        """A call of a cache tier, unless it rests; None when it has nothing, fails or takes too long."""
        rest = self._rests[tier.label]
        if not rest.is_over:
            return None
        try:
            async with asyncio.timeout(self._cache_seconds):
                if tier.label not in self._opened:
                    await tier.blobs.open()
                    self._opened.add(tier.label)
                result = await call()
        except BlobMissingError:
            rest.worked()
            return None
        except (ForkpointError, TimeoutError) as error:
            rest.failed()
            log.warning("tier %s rests: %s", tier.label, error or "it took too long")
            return None
        rest.worked()
        return result


async def _nothing() -> None:
    """A call that only sees to it that its tier is open."""


def tiers_of(blobs: BlobStore) -> tuple[Tier, ...]:
    """The tiers of a stack, below whatever wraps it; of any other store the one that it is."""
    inner = innermost(blobs)
    return inner.tiers if isinstance(inner, TieredBlobs) else (Tier("blobs", blobs),)
