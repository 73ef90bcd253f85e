"""The node's part in garbage collection: it collects the tiers that it can reach, unless another node does."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from contextlib import aclosing

from forkpoint.errors import ForkpointError
from forkpoint.limits import COLLECTOR_RENEW_SECONDS
from forkpoint.server.session.core import INCARNATION, NodeCore
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.election import NOBODY
from forkpoint.statestore.gc import Collector, CollectorOptions, collected
from forkpoint.statestore.gcreport import CollectionReport

log = logging.getLogger(__name__)


class Garbage:
    """Collects each tier every so often while this node is its collector, and at once when somebody asks."""

    def __init__(self, core: NodeCore, blobs: BlobStore | None) -> None:
        options = core.options
        rules = CollectorOptions(options.retention, options.gc_grace_seconds, options.gc_budget_bytes)
        self._core = core
        self._interval = options.gc_interval_seconds or math.inf
        self._collectors = [
            Collector(core.catalog, tier, own, core.clock, core.incarnation)
            for tier, own in (() if blobs is None else collected(blobs, rules))
        ]
        self._due: dict[str, float] = {}
        """By tier, on the node's clock."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Finish at once what a collector that died left, then collect every `gc_interval_seconds`."""
        if self._collectors:
            self._task = self._core.tasks.spawn(self._run(), "garbage collection")

    async def _run(self) -> None:
        while not self._core.leaving:
            for collector in self._collectors:
                try:
                    await self._look(collector)
                except ForkpointError as error:
                    log.warning("collecting tier %s failed: %s", collector.election.tier, error)
            await asyncio.sleep(COLLECTOR_RENEW_SECONDS)

    async def _look(self, collector: Collector) -> None:
        """Stay or become the tier's collector, and collect when it is time; at once what another one left."""
        tier, now = collector.election.tier, self._core.clock.monotonic()
        due = self._due.setdefault(tier, now + self._interval)
        left = collector.election.term == NOBODY and bool(await self._core.catalog.list_condemned(tier, "", 1))
        if due == math.inf and not left:
            return
        await self._bury(collector)
        if not await collector.election.stand() or not (left or now >= due):
            return
        async for report in collector.collect():
            if report.done:
                self._note(report)
        self._due[tier] = self._core.clock.monotonic() + self._interval
        await self._rest(collector)

    async def _bury(self, collector: Collector) -> None:
        """An incarnation that is not registered any more was found dead, or left: no need to watch its counter."""
        election = collector.election
        row = await self._core.catalog.get_collector(election.tier)
        if row.holder == election.holder or not row.holder.startswith(f"{INCARNATION}-"):
            return
        if row.holder not in {node.incarnation for node in await self._core.catalog.list_nodes()}:
            election.presume_dead(row.term)

    async def _rest(self, collector: Collector) -> None:
        """A node that does not collect by itself leaves it to others."""
        if self._interval == math.inf:
            await collector.election.resign()

    def _note(self, report: CollectionReport) -> None:
        counters = self._core.counters
        counters.collections += 1
        counters.checkpoints_dropped += sum(report.checkpoints_dropped.values())
        counters.blobs_deleted += report.blobs_deleted
        counters.bytes_deleted += report.bytes_deleted
        counters.blobs_evicted += report.blobs_evicted
        if report.stopped:
            log.error("tier %s: no blob was deleted: %s", report.tier, report.stopped)
        if report.bytes_over_budget:
            log.warning("tier %s holds %d bytes beyond its budget", report.tier, report.bytes_over_budget)
        if report.blobs_deleted or report.checkpoints_dropped:
            log.info(
                "tier %s: %d checkpoints dropped, %d blobs with %d bytes deleted",
                report.tier,
                sum(report.checkpoints_dropped.values()),
                report.blobs_deleted,
                report.bytes_deleted,
            )

    async def collect(self, dry_run: bool) -> AsyncIterator[CollectionReport]:
        """Collect every tier now, one after the other: each one's report as it grows. CollectedElsewhereError."""
        for collector in self._collectors:
            async with aclosing(collector.collect(dry_run)) as reports:
                async for report in reports:
                    if report.done and not dry_run:
                        self._note(report)
                    yield report
            if not dry_run:
                await self._rest(collector)

    async def leave(self) -> None:
        """The node stops: break off, and let others collect."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for collector in self._collectors:
            try:
                await collector.election.resign()
            except ForkpointError as error:
                log.warning("tier %s: another node collects later: %s", collector.election.tier, error)
