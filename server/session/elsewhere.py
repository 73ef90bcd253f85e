"""Elsewhere: which other node a session of this one goes to, and what the others are told."""

import logging
from collections.abc import Collection

from forkpoint.errors import ForkpointError
from forkpoint.server.scheduler.policy import pages_for
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.live import LiveSession
from forkpoint.server.session.membership import Membership
from forkpoint.server.session.placement import NodeState, PlacementAsk, choose
from forkpoint.statestore.records import NodeRow

log = logging.getLogger(__name__)


class Elsewhere:
    """The other nodes of the same numerics: only these go on with the same bits."""

    def __init__(self, core: NodeCore, membership: Membership) -> None:
        self._core = core
        self._membership = membership

    async def tell(self) -> None:
        """Let others know at once what this node's status is now: they learn it with the next renewal anyway."""
        try:
            await self._core.catalog.renew_lease(self._core.incarnation, self._membership.status())
        except ForkpointError as error:
            log.warning("the node's status is told later: %s", error)

    async def is_there(self) -> bool:
        """Whether any other node would take sessions, by a fresh look. Raises what the store raises."""
        await self._membership.refresh()
        ours, numerics = self._core.incarnation, self._core.engine.facts.numerics_id
        return any(
            node.incarnation != ours and node.numerics_id == numerics and node.state is NodeState.SERVING
            for node in self._membership.candidates()
        )

    def choose(self, live: LiveSession, without: Collection[str]) -> NodeRow | None:
        """Where the session is best placed, but for the incarnations `without`; it counts as sent there from now on.
        None: nowhere."""
        ask = PlacementAsk(
            live.name,
            self._core.engine.facts.numerics_id,
            excluded=frozenset({self._core.incarnation, *without}),
            pages=pages_for(live.head + 1),
        )
        found = choose(self._membership.candidates(), ask)
        if found is None:
            return None
        self._membership.note_placed(found)
        return self._membership.node(found)
