"""Where a session should be: pure functions of what nodes tell about themselves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from hashlib import blake2b
from typing import Final

from forkpoint.ids import SessionName
from forkpoint.statestore.records import NodeStatus

AFFINITY: Final = 0.5
"""What it is worth to have the session's prefix: as much as half of a node's slots."""
SPREAD: Final = 0.25
"""What it costs to have all of a workflow's other sessions."""
HYSTERESIS: Final = 0.25
"""How much better another node must be before a session is not served where it was asked for."""


class NodeState(Enum):
    """Whether calls and sessions may be sent to a node; the names are the API's."""

    SERVING = "SERVING"
    DRAINING = "DRAINING"
    """It answers; nothing is placed on it."""
    STALLED = "STALLED"
    """Its process lives, its work does not get on."""
    DEAD = "DEAD"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node as far as placement is concerned. `placed`: sessions sent to it since it told its status."""

    incarnation: str
    numerics_id: str
    state: NodeState
    status: NodeStatus
    placed: int = 0


@dataclass(frozen=True, slots=True)
class PlacementAsk:
    """What is to be placed. `here`: the node that asks, which wins unless another one is clearly better ("": the best
    one wins). `near`: nodes that have the session's prefix. `workflow`: how many of its workflow's sessions are where,
    as far as that is known. `pages`: what it takes."""

    name: SessionName
    numerics_id: str = ""
    """Only nodes of this one; "": any."""
    here: str = ""
    near: frozenset[str] = frozenset()
    excluded: frozenset[str] = frozenset()
    workflow: Mapping[str, int] = field(default_factory=dict)
    pages: int = 0


def choose(nodes: Sequence[Candidate], ask: PlacementAsk) -> str | None:
    """The incarnation that the session should go to: the least loaded one, less affinity, plus spread. None: no node
    may take it. Of equals, the one that the session's name prefers."""
    costs = {node.incarnation: cost(node, ask) for node in nodes if may_take(node, ask)}
    if not costs:
        return None
    best = min(costs, key=lambda incarnation: (costs[incarnation], _draw(ask.name, incarnation)))
    if ask.here in costs and costs[ask.here] <= costs[best] + HYSTERESIS:
        return ask.here
    return best


def may_take(node: Candidate, ask: PlacementAsk) -> bool:
    """Whether the node is one for the session at all: nothing is sent to one that drains, stalls or is dead, or that
    computes other bits."""
    if node.state is not NodeState.SERVING or node.incarnation in ask.excluded:
        return False
    if ask.numerics_id not in ("", node.numerics_id):
        return False
    return node.status.pages_total == 0 or ask.pages <= node.status.pages_total


def cost(node: Candidate, ask: PlacementAsk) -> float:
    """The lower the better, in nodes' worths of slots."""
    status = node.status
    value = (status.sessions + status.waiting + node.placed) / max(1, status.slots_total)
    if status.pages_total > 0:
        value += 1 - status.pages_free / status.pages_total
    if node.incarnation in ask.near:
        value -= AFFINITY
    total = sum(ask.workflow.values())
    if total > 0:
        value += SPREAD * ask.workflow.get(node.incarnation, 0) / total
    return value


def rank(name: SessionName, nodes: Sequence[Candidate], numerics_id: str = "") -> tuple[str, ...]:
    """Who takes over a session that nobody has, in order of turn. Every node that sees the same nodes comes to the same
    order, and many sessions come to nodes in proportion to their free slots.

    Nodes of `numerics_id` only, unless there is none: then any may take it.
    """
    serving = [node for node in nodes if node.state is NodeState.SERVING]
    equal = [node for node in serving if node.numerics_id == numerics_id]
    turns = sorted(equal or serving, key=lambda node: _draw(name, node.incarnation) / (1 + node.status.slots_free))
    return tuple(node.incarnation for node in turns)


def _draw(name: SessionName, incarnation: str) -> float:
    """An exponentially distributed number that depends on both names alone: the smallest of several, each divided by
    its node's weight, is a node's with a probability in proportion to its weight."""
    digest = blake2b(f"{name} {incarnation}".encode(), digest_size=8).digest()
    return -math.log((int.from_bytes(digest, "little") + 0.5) / 2**64)
