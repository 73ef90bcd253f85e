"""The nodes of the store, as this one sees them, and what it tells them about itself."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Final

from forkpoint.server.session.api import NodeEvent, NodeView
from forkpoint.server.session.changes import Signal
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.lease import DeathWatch
from forkpoint.server.session.live import Place
from forkpoint.server.session.placement import Candidate, NodeState
from forkpoint.server.session.tasks import survive
from forkpoint.statestore.records import NodeRow, NodeStatus

log = logging.getLogger(__name__)

NAMES_MAX: Final = 4096
"""Incarnations whose names are remembered."""


class Membership:
    """A directory that is as old as its last look: at most `watch_seconds` while the store answers. Who is to act on
    it looks anew (`refresh`, `holder`); who is sent astray by it does so as well.

    `nodes`: rows in order of registration. `version` counts changes of their states, and of which there are; `changed`
    fires at these, and when anything else that a node tells about itself has changed.
    """

    def __init__(self, core: NodeCore, watch: DeathWatch) -> None:
        self._core = core
        self._watch = watch
        self.nodes: tuple[NodeRow, ...] = ()
        self.version = 0
        self.changed = Signal()
        self._states: dict[str, NodeState] = {}
        self._changes = 0
        self._placed: Counter[str] = Counter()
        self._names: dict[str, str] = {}
        """Of all incarnations that were seen, also those that are gone; the oldest first."""
        self._reading = asyncio.Lock()
        self._reads = 0

    async def run(self) -> None:
        """Look again and again."""
        while True:
            await survive(self.refresh(), "looking at the nodes")
            await asyncio.sleep(self._core.options.watch_seconds)

    async def tell(self) -> None:
        """Ask the engine again and again how much room it has, for `status`. While the engine is busy the answer is
        late, and the status as old as that."""
        while True:
            await survive(self._core.engine.capacity(), "asking the engine for its room")
            await asyncio.sleep(self._core.options.lease_renew_seconds)

    async def refresh(self) -> tuple[NodeRow, ...]:
        """Read the nodes anew: what comes back was read after the call. Callers at one time share a read."""
        asked = self._reads
        async with self._reading:
            if self._reads <= asked:
                self._reads += 1
                began = self._core.clock.monotonic()
                self._take(await self._core.catalog.list_nodes(), began)
            return self.nodes

    def node(self, incarnation: str) -> NodeRow | None:
        """The row of an incarnation."""
        return next((node for node in self.nodes if node.incarnation == incarnation), None)

    def name_of(self, incarnation: str) -> str | None:
        """The node that an incarnation is, or was; None when it was gone before anybody looked here."""
        return self._names.get(incarnation)

    def named(self, name: str) -> NodeRow | None:
        """The newest incarnation of a node."""
        return next((node for node in reversed(self.nodes) if node.node == name), None)

    def state(self, row: NodeRow) -> NodeState:
        """What may be sent to a node. One that is not known (any more) is dead."""
        return self._states.get(row.incarnation, NodeState.DEAD)

    def living(self) -> list[NodeRow]:
        """All that are not known to be dead, this one among them."""
        return [node for node in self.nodes if self.state(node) is not NodeState.DEAD]

    def views(self) -> list[NodeView]:
        """All nodes, as callers see them."""
        return [NodeView(node, self.state(node)) for node in self.nodes]

    async def watch(self) -> AsyncIterator[NodeEvent]:
        """Every node as it is, then whatever comes, goes or changes beside its counter, for ever."""
        known: dict[str, NodeView] = {}
        while True:
            changes = self._changes
            seen = {view.row.incarnation: view for view in self.views()}
            for incarnation, view in known.items():
                if incarnation not in seen:
                    yield NodeEvent(view, gone=True)
            for incarnation, view in seen.items():
                if incarnation not in known or _told(known[incarnation]) != _told(view):
                    yield NodeEvent(view)
            known = seen
            while self._changes == changes:
                await self.changed.wait()

    async def holder(self, incarnation: str) -> NodeRow | None:
        """The node that has what `incarnation` owns; None when it is dead or gone, by a look that was made for it."""
        for attempt in range(2):
            node = self.node(incarnation)
            # A lock that was let go since the last look is seen at once.
            if node is not None and self._judge(node) is not NodeState.DEAD and self.state(node) is not NodeState.DEAD:
                return node
            if attempt == 0:
                await self.refresh()
        return None

    def candidates(self) -> list[Candidate]:
        """All nodes, for placement."""
        return [
            Candidate(
                node.incarnation,
                node.numerics_id,
                self.state(node),
                node.status,
                self._placed[node.incarnation],
            )
            for node in self.nodes
        ]

    def note_placed(self, incarnation: str) -> None:
        """A session was sent there: until the node tells its status anew it counts as one more."""
        self._placed[incarnation] += 1

    def status(self) -> NodeStatus:
        """What this node tells with each renewal of its lease. May be called from any thread."""
        core = self._core
        lives = list(core.lives.values())
        capacity = core.engine.known_capacity
        told = NodeStatus(
            draining=core.cordoned or core.draining or core.leaving,
            stalled=bool(core.progress.stalled),
            sessions=len(lives),
            waiting=sum(live.place is not Place.RESIDENT and live.generation is not None for live in lives),
            following=len(core.follows),
        )
        if capacity is None:
            return told
        return replace(
            told,
            slots_total=capacity.slots_total,
            slots_free=capacity.slots_free,
            pages_total=capacity.pages_total,
            pages_free=capacity.pages_free,
        )

    def _take(self, rows: list[NodeRow], began: float) -> None:
        """Note what was read; the read began at `began` on our clock."""
        self._watch.observe(rows, self._core.incarnation, began)
        known = {node.incarnation: node for node in self.nodes}
        states = {node.incarnation: self._judge(node) for node in rows}
        for node in rows:
            was = known.get(node.incarnation)
            if was is None or was.counter != node.counter:
                self._placed.pop(node.incarnation, None)
        if states != self._states:
            self.version += 1
        self._names |= {node.incarnation: node.node for node in rows}
        for incarnation in list(self._names)[:-NAMES_MAX]:
            del self._names[incarnation]
        before = [_told(view) for view in self.views()]
        self.nodes, self._states = tuple(rows), states
        if [_told(view) for view in self.views()] != before:
            self._changes += 1
            self.changed.fire()

    def _judge(self, node: NodeRow) -> NodeState:
        own = node.incarnation == self._core.incarnation
        if not own and self._watch.is_dead(node):
            return NodeState.DEAD
        status = self.status() if own else node.status
        if status.stalled:
            return NodeState.STALLED
        return NodeState.DRAINING if status.draining else NodeState.SERVING


def _told(view: NodeView) -> NodeView:
    """What is told of a node: not how often it renewed its lease."""
    return replace(view, row=replace(view.row, counter=0))
