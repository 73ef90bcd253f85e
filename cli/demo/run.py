"""Both sides of the demo: servers, clients, and the comparison at the end."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from forkpoint.cli.demo.report import Report, SessionResult, Step, compare
from forkpoint.cli.demo.server import ServerProcess
from forkpoint.cli.demo.store import remains, store_size
from forkpoint.cli.demo.story import CHECKPOINT_EVERY_TOKENS, WORKFLOW, Interruptions, Remains, Story
from forkpoint.client.client import Client
from forkpoint.clock import Clock, SystemClock

STEPS: Final = 20
"""Steps of both sides together."""
INTERRUPTED: Final = "interrupted"
UNDISTURBED: Final = "undisturbed"


class Demo:
    """`told` hears of every step as it ends. Servers keep stores and logs in `folder`."""

    def __init__(
        self, folder: Path, told: Callable[[Step], None], sabotage: str | None = None, clock: Clock | None = None
    ) -> None:
        self.folder, self.told, self.sabotage = folder, told, sabotage
        self.clock = clock or SystemClock()
        self.report = Report(sabotage=sabotage or "")
        self.store = folder / "store"
        damage = ("--sabotage", sabotage) if sabotage else ()
        every = ("--checkpoint-every", str(CHECKPOINT_EVERY_TOKENS))
        self.first = ServerProcess("first", self.store, folder / "first.log", (*every, *damage))
        self.second = ServerProcess("second", self.store, folder / "second.log", (*every, *damage))
        self.empty = ServerProcess("empty", folder / "empty", folder / "empty.log", ("--checkpoint-every", "0"))

    async def run(self) -> Report:
        """Tell the story on both sides and compare. Servers are gone when it returns or raises."""
        try:
            interrupted = await self._interrupted()
            undisturbed = await self._undisturbed()
        finally:
            for server in (self.first, self.second, self.empty):
                if server.running:
                    await server.kill()
        for session, result in interrupted.items():
            self.report.comparisons.append(compare(session, result, undisturbed[session]))
        return self.report

    def _heard(self, side: str) -> Callable[[Step], None]:
        def hear(step: Step) -> None:
            self.report.steps.append(replace(step, side=side))
            self.told(step)

        return hear

    async def _start(self, server: ServerProcess, side: str) -> None:
        began = self.clock.monotonic()
        await server.start()
        self._heard(side)(Step("start a server on an empty store", self.clock.monotonic() - began))

    async def _interrupted(self) -> dict[str, SessionResult]:
        await self._start(self.first, INTERRUPTED)
        async with AsyncExitStack() as clients:

            async def kill_and_restart() -> dict[str, Remains]:
                await self.first.kill()
                left = await remains(self.store)
                await self.first.start()
                # Not before: a second server on the store would have taken the dead one's sessions.
                await self.second.spawn()
                return left

            async def second_server() -> Client:
                await self.second.wait_ready()
                return await clients.enter_async_context(Client(self.second.address))

            client = await clients.enter_async_context(Client(self.first.address))
            interruptions = Interruptions(kill_and_restart, second_server)
            story = Story(client, self.clock, self._heard(INTERRUPTED), interruptions)
            results = await story.tell()
            self.report.answers += story.answers
            names = [f"workflows/{WORKFLOW}/sessions/{session}" for session in results]
            self.report.store = asdict(await store_size(client, names, self.store))
        for server in (self.second, self.first):
            await server.stop()
        return results

    async def _undisturbed(self) -> dict[str, SessionResult]:
        await self._start(self.empty, UNDISTURBED)
        async with Client(self.empty.address) as client:
            results = await Story(client, self.clock, self._heard(UNDISTURBED)).tell()
        await self.empty.stop()
        return results
