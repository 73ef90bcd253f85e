"""One run: sessions live while evils happen, and everything is compared in the end."""

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

from redis.exceptions import RedisError

from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.session import Session
from forkpoint.statestore.check import Severity, check
from forkpoint.statestore.open import find_marker, open_blobs, open_catalog
from tests.chaos.chatter import Story, open_workflow
from tests.chaos.fleet import NodeFailedError
from tests.chaos.nemesis import DeedSource, Nemesis, deeds
from tests.chaos.quiet import Judge
from tests.chaos.records import records_in, stale_records
from tests.chaos.site import Site
from tests.chaos.verdict import Settings, Verdict, unexpected

CLIENTS: Final = 3
JUDGES: Final = 8
SETTLE_SECONDS: Final = 300.0
"""Once all is well again, what is under way must end within this."""
LOOK_SECONDS: Final = 0.25
REPORT_SECONDS: Final = 10.0
REFUSALS_MAX: Final = 5
"""A run in which more calls failed for good than this is broken off."""


class Play:
    """The run of one site."""

    def __init__(self, site: Site, tell: Callable[[str], None], enough: asyncio.Event) -> None:
        self.site, self.settings = site, site.settings
        self._tell = tell
        self._enough = enough
        self.verdict = Verdict()
        self.nemesis: Nemesis
        self._stories: dict[int, Story] = {}
        self._numbers = itertools.count()
        self._ended = asyncio.Event()
        self._broken = False
        self._shown = 0
        self._told = 0

    async def run(self) -> Verdict:
        """The whole of it."""
        began = time.monotonic()
        async with AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self.site.client(n)) for n in range(len(self.site.seats))]
            self.nemesis = Nemesis(
                self.site.seats,
                self.site.network,
                self.site.redis,
                self._tell,
                clients[-1],
                self._sessions,
                lambda: self._shown,
                self.settings.between,
            )
            reader = await stack.enter_async_context(self.site.client(0))
            seat = await self.site.quiet()
            quiet = await stack.enter_async_context(Client(seat.address))
            await open_workflow(clients[0])
            await open_workflow(quiet)
            judge = Judge(reader, quiet, JUDGES)
            judging = asyncio.get_running_loop().create_task(judge.run())  # owner: this function
            try:
                await self._disturb(clients, judge, began)
                judge.finish()
                await judging
            finally:
                judging.cancel()
        self.verdict.lost += judge.lost
        self.verdict.divergent += judge.divergent
        self.verdict.counts = {**judge.counts, "stories": self._told, "tokens streamed and appended": self._shown}
        await self._part()
        self.verdict.deeds, self.verdict.skipped = dict(self.nemesis.counts), self.nemesis.skipped
        self.verdict.moves = dict(self.nemesis.outcomes)
        self.verdict.seconds = round(time.monotonic() - began, 1)
        return self.verdict

    async def _disturb(self, clients: list[Client], judge: Judge, began: float) -> None:
        """Stories and evils, until it is time; then the stories' ends."""
        async with asyncio.TaskGroup() as group:
            tellers = [
                group.create_task(self._tell_stories(clients[worker % len(clients)], judge))
                for worker in range(self.settings.sessions)
            ]
            async with asyncio.TaskGroup() as group_of_lanes:
                for lane in self.settings.lanes:
                    group_of_lanes.create_task(self._lane(deeds(self.settings.seed, lane, len(self.site.seats))))
                await self._wait(began)
                self.nemesis.stop()
            self._tell("all is well again")
            self._ended.set()
            _, hanging = await asyncio.wait(tellers, timeout=SETTLE_SECONDS)
            for task in hanging:
                task.cancel()
        self.verdict.lost += [f"a session did not end within {SETTLE_SECONDS:g} s of calm" for _ in hanging]

    async def _lane(self, source: DeedSource) -> None:
        """One sequence of evils; a node that fails by itself, or a store that does not come back, ends the run."""
        try:
            await self.nemesis.run(source)
        except (NodeFailedError, TimeoutError, RedisError) as error:
            self.verdict.nodes.append(f"{type(error).__name__}: {error}")
            self._broken = True

    async def _wait(self, began: float) -> None:
        reported = began
        while not self._is_over(began):
            await asyncio.sleep(LOOK_SECONDS)
            if time.monotonic() - reported > REPORT_SECONDS:
                reported = time.monotonic()
                kills = self.nemesis.counts["kill"]
                self._tell(f"{reported - began:.0f} s: {kills} kills, {self._told} stories, {self._shown} tokens")

    def _is_over(self, began: float) -> bool:
        if self._broken or self._enough.is_set() or len(self.verdict.nodes) > REFUSALS_MAX:
            return True
        enough = self.nemesis.counts["kill"] >= self.settings.kills
        return enough and time.monotonic() - began >= self.settings.seconds

    async def _tell_stories(self, client: Client, judge: Judge) -> None:
        while not self._ended.is_set():
            story = Story(self.settings.seed, next(self._numbers), self.settings.tokens)
            self._stories[story.number] = story
            try:
                await story.tell(client, self._count, self._ended.is_set)
            except (RemoteError, AssertionError) as error:
                self.verdict.nodes.append(f"session s{story.number}: {error}")
                self._tell(self.verdict.nodes[-1])
                continue
            finally:
                del self._stories[story.number]
            self._told += 1
            judge.submit(story)

    def _sessions(self) -> list[Session]:
        """Of the stories that are being told."""
        return [story.session for _, story in sorted(self._stories.items()) if story.session is not None]

    def _count(self, tokens: int) -> None:
        self._shown += tokens

    async def _part(self) -> None:
        """Stop all nodes, then look at what they leave."""
        verdict, site = self.verdict, self.site
        for seat in site.seats:
            try:
                status = await seat.terminate()
            except NodeFailedError as error:
                verdict.nodes.append(str(error))
                continue
            if seat.cut_off:
                verdict.counts["drains cut off"] = verdict.counts.get("drains cut off", 0) + 1
            elif status != 0:
                verdict.nodes.append(f"{seat.name} ended with {status}:\n{seat.log_tail()}")
        verdict.nodes += unexpected([seat.log for seat in site.seats])
        verdict.stale = stale_records(records_in(site.catalog_url))
        verdict.findings = await check_store(site.catalog_url, site.blobs_url)


async def check_store(catalog_url: str, blobs_url: str) -> list[str]:
    """What `forkpoint check` calls an error."""
    marker = await find_marker(catalog_url)
    assert marker is not None, "there is no store"
    catalog, blobs = open_catalog(catalog_url), open_blobs(blobs_url)
    await catalog.open(marker)
    try:
        return [str(found) async for found in check(catalog, blobs) if found.severity is Severity.ERROR]
    finally:
        await catalog.close()
        await blobs.close()


async def play(
    settings: Settings, folder: Path, tell: Callable[[str], None], enough: asyncio.Event | None = None
) -> Verdict:
    """A whole run in a folder of its own; it ends early when `enough` is set."""
    async with Site(settings, folder) as site:
        return await Play(site, tell, enough or asyncio.Event()).run()
