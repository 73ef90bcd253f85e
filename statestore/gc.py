"""Garbage collection of one tier: checkpoints by retention, manifests that none names, blobs that no manifest names.

statestore/collection.py says how a blob is deleted so that none is ever missing. Whatever dies on the way leaves at
most condemned blobs, which the next collection of the tier finishes, and garbage, which it finds again.
"""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from forkpoint.clock import Clock
from forkpoint.limits import GC_GRACE_SECONDS_DEFAULT
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.election import Election
from forkpoint.statestore.errors import CollectedElsewhereError
from forkpoint.statestore.gcreport import CollectionReport
from forkpoint.statestore.manifest import digests_in
from forkpoint.statestore.mark import Mark
from forkpoint.statestore.records import Durability, ManifestKey
from forkpoint.statestore.retention import RetentionPolicy
from forkpoint.statestore.retire import Retirement
from forkpoint.statestore.scan import all_manifests, stored_sizes
from forkpoint.statestore.tiers import Role, tiers_of

BATCH: Final = 500
"""Blobs condemned, deleted and absolved together: a saver that needs one of them waits for about as long as their
deletes take."""
PAGE: Final = 1000


@dataclass(frozen=True, slots=True)
class CollectorOptions:
    """What a collection goes by."""

    policy: RetentionPolicy
    grace_seconds: float = GC_GRACE_SECONDS_DEFAULT
    """How long a blob was seen unnamed before it is deleted."""
    budget_bytes: int = 0
    """What the tier may hold; 0: any amount. Checkpoints beyond those that sessions need are dropped for it."""
    cache: bool = False
    """Whether the tier may forget: then it loses blobs beyond its budget, and no checkpoint is dropped for it."""


def collected(blobs: BlobStore, options: CollectorOptions) -> list[tuple[BlobStore, CollectorOptions]]:
    """The tiers of a stack (or the one store that it is) that are collected, with what each goes by. A cache in memory
    is not: it keeps to its own budget, and is gone with its process."""
    tiers = [(tier.blobs, tier.role is Role.CACHE) for tier in tiers_of(blobs)]
    kept = [(store, cache) for store, cache in tiers if not (cache and store.durability is Durability.MEMORY)]
    return [(store, replace(options, cache=cache)) for store, cache in kept]


class Collector:
    """Collects one tier, time and again. What it saw unnamed it remembers between collections, on its own clock."""

    def __init__(
        self, catalog: Catalog, blobs: BlobStore, options: CollectorOptions, clock: Clock, holder: str
    ) -> None:
        """`blobs`: a single place that is open, no stack of tiers. `holder`: an incarnation, or a tool's own name."""
        self._catalog = catalog
        self._blobs = blobs
        self._options = options
        self._clock = clock
        self._unnamed: dict[bytes, float] = {}
        """Since when, by our clock, a blob was in the tier and in no manifest."""
        self._noted = 0
        """The last absolution when the collection before this one ended."""
        self._heirs: dict[str, Election] = {}
        self._turn = asyncio.Lock()
        self.election = Election(catalog, blobs.tier, holder, clock)

    async def collect(self, dry_run: bool = False) -> AsyncGenerator[CollectionReport, None]:
        """Collect once: the same report again and again as it grows, `done` at the end. One collection at a time; a
        second call waits. Ended early it leaves nothing that the next one does not finish.

        Unless it is a dry run, raises CollectedElsewhereError while another one is the tier's collector, and
        StaleCollectorError when another one becomes it.
        """
        async with self._turn:
            report = CollectionReport(self._blobs.tier, dry_run)
            if not dry_run:
                await self._begin(report)
            async for _ in self._steps(report):
                yield report
                if not dry_run:
                    await self.election.keep()
            report.done = True
            yield report

    async def _begin(self, report: CollectionReport) -> None:
        election = self.election
        if not await election.stand():
            raise CollectedElsewhereError(election.tier, election.other)
        await self._blobs.fence(election.term)
        await self._absolve_for_the_dead()
        await self._drop_pins(report)

    async def _steps(self, report: CollectionReport) -> AsyncGenerator[None, None]:
        options, kept = self._options, set[ManifestKey]()
        retirement = Retirement(
            self._catalog,
            self._blobs,
            options.policy,
            0 if options.cache else options.budget_bytes,
            self._clock,
            report,
            kept,
        )
        async for _ in retirement.run():
            yield
        left = [] if report.dry_run else await self._condemned(self._blobs.tier)
        if report.dry_run:
            kept.update(pin.key for pin in await self._catalog.list_pins())
        mark = Mark(self._catalog, report, kept if report.dry_run else None)
        async for _ in mark.run():
            yield
        if report.stopped:
            await self._absolve(left)
            return
        await self._absolve([digest for digest in left if bytes.fromhex(digest) in mark.named])
        unnamed = [digest for digest in left if bytes.fromhex(digest) not in mark.named]
        doomed = list(dict.fromkeys([*unnamed, *await self._find_unnamed(report, mark)]))
        for offset in range(0, len(doomed), BATCH):
            await self._remove(report, mark, doomed[offset : offset + BATCH])
            yield
            if report.stopped:
                return
        if options.cache and options.budget_bytes:
            await self._evict(report, options.budget_bytes)
            yield
        await self._forget(report)

    # --- before ------------------------------------------------------------------------------------------------
    async def _drop_pins(self, report: CollectionReport) -> None:
        """A restorer registers before it pins: one that is not registered is gone, or was taken for dead."""
        pins = await self._catalog.list_pins()
        registered = {node.incarnation for node in await self._catalog.list_nodes()} if pins else set()
        for pin in pins:
            if pin.holder not in registered:
                await self._catalog.unpin(pin.pin)
                report.pins_dropped += 1

    async def _absolve_for_the_dead(self) -> None:
        """Blobs that a node condemned in a tier of its own and never absolved, because it is gone: nobody else can
        delete them there, and every saver would be refused them for ever."""
        rows = [row for row in await self._catalog.list_collectors() if row.holder and row.tier != self._blobs.tier]
        registered = {node.incarnation for node in await self._catalog.list_nodes()} if rows else set()
        for row in rows:
            if row.holder in registered or not (digests := await self._condemned(row.tier)):
                continue
            heir = self._heirs.setdefault(
                row.tier, Election(self._catalog, row.tier, self.election.holder, self._clock)
            )
            if await heir.stand():
                await self._catalog.absolve(row.tier, heir.term, digests)
                await heir.resign()

    async def _condemned(self, tier: str) -> list[str]:
        """What a collection of the tier that broke off left."""
        found: list[str] = []
        while page := await self._catalog.list_condemned(tier, found[-1] if found else "", PAGE):
            found += page
        return found

    # --- blobs -------------------------------------------------------------------------------------------------
    async def _find_unnamed(self, report: CollectionReport, mark: Mark) -> list[str]:
        """Blobs of the tier that no manifest names and none named for as long as the grace says."""
        now, before = self._clock.monotonic(), self._unnamed
        seen: dict[bytes, float] = {}
        async for text in self._blobs.digests():
            digest = bytes.fromhex(text)
            if digest not in mark.named:
                seen[digest] = before.get(digest, now)
        if not report.dry_run:
            self._unnamed = seen
        doomed = [digest.hex() for digest, since in seen.items() if now - since >= self._options.grace_seconds]
        report.blobs_waiting = len(seen) - len(doomed)
        return doomed

    async def _remove(self, report: CollectionReport, mark: Mark, digests: Sequence[str]) -> None:
        """Condemn, look again, delete, absolve."""
        if report.dry_run:
            await self._count(report, digests)
            report.doomed += digests
            return
        term = self.election.term
        await self._catalog.condemn(self._blobs.tier, term, digests)
        await mark.catch_up()
        if report.stopped:
            await self._absolve(digests)
            return
        doomed = [digest for digest in digests if bytes.fromhex(digest) not in mark.named]
        report.blobs_spared += len(digests) - len(doomed)
        await self._count(report, doomed)
        await self._blobs.delete(doomed, term)
        await self._absolve(digests)
        for digest in digests:
            self._unnamed.pop(bytes.fromhex(digest), None)

    async def _count(self, report: CollectionReport, digests: Sequence[str]) -> None:
        sizes = await self._blobs.sizes(digests)
        report.blobs_deleted += sum(size is not None for size in sizes)
        report.bytes_deleted += sum(size or 0 for size in sizes)

    async def _absolve(self, digests: Sequence[str]) -> None:
        if digests:
            await self._catalog.absolve(self._blobs.tier, self.election.term, digests)

    async def _evict(self, report: CollectionReport, budget_bytes: int) -> None:
        """Of a cache: drop what only old manifests name. Whoever reads it next finds it in another tier."""
        sizes = await stored_sizes(self._blobs)
        excess = sum(sizes.values()) - budget_bytes
        pinned = {pin.key for pin in await self._catalog.list_pins()}
        newest: dict[bytes, float] = {}
        async for scanned in all_manifests(self._catalog):
            rank = math.inf if scanned.row.key in pinned else scanned.number
            for digest in digests_in(scanned.row.manifest):
                newest[digest] = max(rank, newest.get(digest, 0))
        order = sorted((rank, digest) for digest, rank in newest.items() if digest in sizes and rank < math.inf)
        doomed: list[str] = []
        for _, digest in order:
            if excess <= 0:
                break
            excess -= sizes[digest]
            doomed.append(digest.hex())
            report.bytes_evicted += sizes[digest]
        report.blobs_evicted, report.bytes_over_budget = len(doomed), max(0, excess)
        for offset in range(0, 0 if report.dry_run else len(doomed), BATCH):
            await self._blobs.delete(doomed[offset : offset + BATCH], self.election.term)

    async def _forget(self, report: CollectionReport) -> None:
        """Notes of absolutions that were made before the last collection ended: a saver that began before is refused
        all its blobs once, and looks again."""
        if not report.dry_run:
            await self._catalog.forget_absolutions(self._noted)
            self._noted = await self._catalog.absolutions()
