"""Which running sessions move where, so that nodes have about as much to do as one another."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from forkpoint.ids import SessionName
from forkpoint.server.session.api import PlannedMove
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.membership import Membership
from forkpoint.server.session.placement import NodeState


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """A node that serves, and the sessions that run on it, those that are moved first at the front. Only nodes of one
    numerics id may be compared."""

    incarnation: str
    slots_total: int
    running: tuple[SessionName, ...]


@dataclass(frozen=True, slots=True)
class Move:
    """One session from node to node, by their incarnations."""

    name: SessionName
    source: str
    target: str


def plan_moves(nodes: Sequence[NodeLoad], moves_max: int = 0) -> list[Move]:
    """Moves, one at a time from the fullest node to the emptiest, for as long as the target is then less full than the
    source was: so that each move helps, none is undone by a later one, and nodes of one size end at most one session
    apart. `moves_max` 0: as many as it takes. Fullness: running sessions by slots."""
    counts = {node.incarnation: len(node.running) for node in nodes}
    slots = {node.incarnation: max(1, node.slots_total) for node in nodes}
    left = {node.incarnation: list(reversed(node.running)) for node in nodes}
    moves: list[Move] = []
    while len(nodes) > 1 and not 0 < moves_max <= len(moves):
        source = max(counts, key=lambda at: (counts[at] / slots[at], at))
        target = min(counts, key=lambda at: ((counts[at] + 1) / slots[at], at))
        if (counts[target] + 1) * slots[source] >= counts[source] * slots[target] or not left[source]:
            break
        moves.append(Move(left[source].pop(), source, target))
        counts[source] -= 1
        counts[target] += 1
    return moves


class Balancer:
    """Plans over all nodes that serve; each numerics id for itself, since only equal ones go on with the same bits."""

    def __init__(self, core: NodeCore, members: Membership) -> None:
        self._core = core
        self._members = members

    async def plan(self, moves_max: int) -> list[PlannedMove]:
        """Moves by who runs what now, short logs first: they are restored soonest. Raises what the store raises."""
        nodes = {
            node.incarnation: node
            for node in await self._members.refresh()
            if self._members.state(node) is NodeState.SERVING
        }
        running: dict[str, list[tuple[int, SessionName]]] = defaultdict(list)
        for row in await self._core.catalog.list_open_generations():
            running[row.owner].append((row.head, row.name))
        groups: dict[str, list[NodeLoad]] = defaultdict(list)
        for node in nodes.values():
            names = tuple(name for _, name in sorted(running[node.incarnation], key=lambda at: (at[0], str(at[1]))))
            groups[node.numerics_id].append(NodeLoad(node.incarnation, node.status.slots_total, names))
        moves: list[Move] = []
        for loads in groups.values():
            if not 0 < moves_max <= len(moves):
                moves += plan_moves(loads, max(0, moves_max - len(moves)))
        return [PlannedMove(move.name, nodes[move.source], nodes[move.target]) for move in moves]
