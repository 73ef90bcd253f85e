"""The same stories on a server that nobody disturbs, and the comparison."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from forkpoint.client.client import Client
from tests.chaos.chatter import Chatter, Story
from tests.support.talkers import insist

Log = tuple[list[int], list[int]]
"""Token ids and their kinds."""


@dataclass
class Judge:
    """Compares finished stories with an undisturbed run of theirs, one after the other, while others go on."""

    disturbed: Client
    quiet: Client
    workers: int
    lost: list[str] = field(default_factory=list)
    divergent: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    _waiting: "asyncio.Queue[Story | None]" = field(default_factory=asyncio.Queue)

    def submit(self, story: Story) -> None:
        """It is finished."""
        self._waiting.put_nowait(story)

    async def run(self) -> None:
        """Until `finish`, then what still waits."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self.workers):
                group.create_task(self._work())

    def finish(self) -> None:
        """No more will be submitted."""
        for _ in range(self.workers):
            self._waiting.put_nowait(None)

    async def _work(self) -> None:
        while (story := await self._waiting.get()) is not None:
            await self._judge(story)

    async def _judge(self, story: Story) -> None:
        again = Story(story.seed, story.number, story.tokens, story.turns)
        await again.tell(self.quiet)
        twins = {one.short: one for one in again.family}
        if twins.keys() != {one.short for one in story.family}:
            self.divergent.append(f"session s{story.number}: other children")
        for one in story.family:
            log = await self._log(one)
            self.counts["sessions"] += 1
            self.counts["tokens"] += len(log[0])
            self.counts["positions shown"] += len(one.seen)
            self.counts["streams opened again"] += one.reconnects
            self.counts["quarantines"] += one.quarantines
            if missing := [p for p, token in one.seen.items() if p >= len(log[0]) or log[0][p] != token]:
                self.lost.append(f"{one.short}: positions {missing[:5]} were shown, the log of {len(log[0])} differs")
            if one.short in twins and log != await twins[one.short].log():
                self.divergent.append(f"{one.short}: its log is not that of an undisturbed run")

    async def _log(self, one: Chatter) -> Log:
        session = self.disturbed.sessions.open(one.session.name)
        ids, kinds = list[int](), list[int]()

        async def read() -> None:
            ids.clear()
            kinds.clear()
            async for chunk in session.tokens():
                ids.extend(chunk.token_ids)
                kinds.extend(int(kind) for kind in chunk.kinds)

        await insist(read)
        return ids, kinds
