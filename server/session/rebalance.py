"""Which running sessions move where, so that nodes have about as much to do as one another. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from forkpoint.ids import SessionName


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
