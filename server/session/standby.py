"""Hot standbys: nodes that bring a session along all the time, so that they go on at once when its owner dies."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final

from forkpoint.errors import ForkpointError
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.elsewhere import Elsewhere
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.ports import FollowAsk, FollowReport, Peers
from forkpoint.statestore.records import NodeRow

log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.5
"""How often an owner looks whether each session has the standbys it is to have."""
AVOID_SECONDS: Final = 10.0
"""A node that could not bring a session along, or lost it, is asked for it again after so long."""


@dataclass(slots=True)
class Kept:
    """The standbys of one session: who follows it, and who is not asked until when."""

    live: LiveSession
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    avoided: dict[str, float] = field(default_factory=dict)


class Standbys:
    """Keeps followers of this node's sessions on other nodes, as many as each session's row says."""

    def __init__(self, core: NodeCore, elsewhere: Elsewhere, peers: Peers) -> None:
        self._core = core
        self._elsewhere = elsewhere
        self._peers = peers
        self._kept: dict[LiveSession, Kept] = {}

    async def run(self) -> None:
        """Look again and again."""
        while not self._core.draining:
            try:
                self.look()
            except Exception:
                log.exception("looking after standbys failed")
            await asyncio.sleep(LOOK_SECONDS)

    def look(self) -> None:
        """Ask for what is missing, let go of what is too much."""
        for live in [live for live in self._kept if self._core.lives.get(live.name) is not live]:
            for task in self._kept.pop(live).tasks.values():
                task.cancel()
        for live in list(self._core.lives.values()):
            wanted = 0 if _was_lost(live) else live.row.standbys
            kept = self._kept.get(live)
            if kept is None and wanted > 0:
                kept = self._kept[live] = Kept(live)
            if kept is not None:
                self._match(kept, wanted)

    def following(self, live: LiveSession) -> int:
        """Standbys of the session that were asked for and have not failed."""
        kept = self._kept.get(live)
        return 0 if kept is None else len(kept.tasks)

    def _match(self, kept: Kept, wanted: int) -> None:
        now = self._core.clock.monotonic()
        kept.avoided = {node: until for node, until in kept.avoided.items() if now < until}
        for incarnation in list(kept.tasks)[wanted:]:
            kept.tasks.pop(incarnation).cancel()
        while len(kept.tasks) < wanted:
            node = self._elsewhere.choose(kept.live, {*kept.tasks, *kept.avoided})
            if node is None:
                return
            name = f"standby of {kept.live.name} at {node.node}"
            kept.tasks[node.incarnation] = self._core.tasks.spawn(self._keep(kept, node), name)

    async def _keep(self, kept: Kept, node: NodeRow) -> None:
        """One standby, for as long as it lasts."""
        live, options = kept.live, self._core.options
        ask = FollowAsk(live.name, live.epoch, self._core.incarnation, options.address)
        try:
            async with aclosing(self._peers.follow(node, ask)) as reports:
                await _drain(reports)
        except ForkpointError as error:
            log.info("%s has no standby at %s: %s", live.name, node.node, error)
        kept.tasks.pop(node.incarnation, None)
        kept.avoided[node.incarnation] = self._core.clock.monotonic() + AVOID_SECONDS


async def _drain(reports: AsyncGenerator[FollowReport, None]) -> None:
    async for _ in reports:
        pass


def _was_lost(live: LiveSession) -> bool:
    """Whether an owner lost it at this very head: what killed that one would kill who brings it along."""
    return live.row.takeovers > 0 and live.head == live.row.takeover_head
