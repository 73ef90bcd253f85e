"""Where a session should be that nobody owns, when a call for it may as well be answered by another node."""

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from forkpoint.errors import NotFoundError, SessionRelocatingError
from forkpoint.server.scheduler.policy import pages_for
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.membership import Membership
from forkpoint.server.session.placement import PlacementAsk, choose
from forkpoint.statestore.records import NodeRow, SessionRow

WORKFLOW_SESSIONS_MAX: Final = 64
"""A workflow with more sessions than this is not counted: they spread by load alone."""


@dataclass(slots=True)
class FreeCall:
    """A call that another node may answer. `without`: addresses that did not."""

    without: set[str] = field(default_factory=set)


_call: ContextVar[FreeCall | None] = ContextVar("call", default=None)


def free_call() -> FreeCall:
    """From here on, what this task does and what it starts is for a call that another node may answer. Without this a
    node serves by itself, as in recovery, or for a call that another node sent."""
    call = FreeCall()
    _call.set(call)
    return call


def is_free() -> bool:
    """Whether this is done for a call that another node may answer."""
    return _call.get() is not None


class Whereabouts:
    """Sends free calls on, by SessionRelocatingError."""

    def __init__(self, core: NodeCore, members: Membership) -> None:
        self._core = core
        self._members = members

    async def place(self, row: SessionRow) -> None:
        """Raises SessionRelocatingError when a free call for this session, which nobody owns, is better answered by
        another node: less loaded, or with the session's prefix. Of equals this one answers."""
        call = _call.get()
        others = {node.incarnation: node for node in self._members.nodes if node.incarnation != self._core.incarnation}
        if call is None or all(node.address in call.without for node in others.values()):
            return
        ask = PlacementAsk(
            row.name,
            row.numerics_ids[-1] if row.numerics_ids else "",
            self._core.incarnation,
            near=await self._near(row),
            excluded=frozenset(incarnation for incarnation, node in others.items() if node.address in call.without),
            workflow=await self._workflow(row),
            pages=pages_for(row.head + 1),
        )
        chosen = others.get(choose(self._members.candidates(), ask) or "")
        if chosen is not None:
            self._members.note_placed(chosen.incarnation)
            raise _sent_to(row, chosen)

    def to_owner(self, row: SessionRow, owner: NodeRow | None) -> None:
        """Raises SessionRelocatingError when a free call that any node could answer is better answered by the session's
        owner, another node."""
        call = _call.get()
        if call is not None and owner is not None and owner.address not in call.without:
            raise _sent_to(row, owner)

    async def _near(self, row: SessionRow) -> frozenset[str]:
        """Who has the state that a fork begins with."""
        if row.parent is None or row.head != row.fork_position:
            return frozenset()
        try:
            parent = await self._core.catalog.get_session(row.parent)
        except NotFoundError:
            return frozenset()
        return frozenset({parent.owner} - {""})

    async def _workflow(self, row: SessionRow) -> Counter[str]:
        """How many other sessions of its workflow are where, but for the one that it was forked from."""
        rows = await self._core.catalog.list_sessions(row.name.workflow, None, WORKFLOW_SESSIONS_MAX + 1)
        if len(rows) > WORKFLOW_SESSIONS_MAX:
            return Counter()
        return Counter(other.owner for other in rows if other.owner and other.name not in (row.name, row.parent))


def _sent_to(row: SessionRow, node: NodeRow) -> SessionRelocatingError:
    return SessionRelocatingError(str(row.name), node.node, node.address)
