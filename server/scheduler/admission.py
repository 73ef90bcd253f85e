"""Who gets a slot next: a pure function of the sessions that wait for one and of those that could make room."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from forkpoint.server.scheduler.history import take_turns
from forkpoint.server.scheduler.policy import Idle, pages_for

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Waiting(Generic[K]):
    """A session that needs a slot: to be created, restored or forked into.

    `position`: tokens it will hold when its operation begins (its head), which is what its pages are counted for.
    `since`: arrival number, unique. `foreground`: a caller waits for it; others (prefetch, background prefill) queue
    behind all of these.
    """

    key: K
    workflow: str
    position: int
    since: int
    foreground: bool = True


@dataclass(frozen=True, slots=True)
class Admission(Generic[K]):
    """`admit`: give these a slot now, in this order. `park`: idle sessions to checkpoint and free, so that those who
    still wait can be admitted by a later plan. `never`: sessions that don't fit even on an empty node.
    """

    admit: tuple[K, ...]
    park: tuple[K, ...]
    never: tuple[K, ...]


@dataclass(frozen=True, slots=True)
class NodeRoom:
    """The engine's pools: Capacity's counts."""

    slots_total: int
    slots_free: int
    pages_total: int
    pages_free: int


def plan_admission(waiting: Sequence[Waiting[K]], idle: Sequence[Idle[K]], room: NodeRoom) -> Admission[K]:
    """Plan admissions. In order of arrival, workflows taking turns; nobody overtakes the first one that does not fit,
    so that a large session is not starved by small ones. Busy sessions are never parked for a waiting one.

    Sessions parked by an earlier plan and not yet free must not be listed in `idle` again.
    """
    fitting = [w for w in waiting if _pages(w) <= room.pages_total and room.slots_total > 0]
    never = tuple(w.key for w in waiting if w not in fitting)
    queue = _in_order([w for w in fitting if w.foreground]) + _in_order([w for w in fitting if not w.foreground])
    slots, pages = room.slots_free, room.pages_free
    admit: list[K] = []
    for session in queue:
        if slots < 1 or pages < _pages(session):
            return Admission(tuple(admit), _make_room(session, idle, slots, pages), never)
        admit.append(session.key)
        slots -= 1
        pages -= _pages(session)
    return Admission(tuple(admit), (), never)


def _pages(session: Waiting[K]) -> int:
    """Pages for its tokens and one more: a session that can't take a step must not be admitted."""
    return pages_for(session.position + 1)


def _in_order(waiting: Sequence[Waiting[K]]) -> list[Waiting[K]]:
    """Workflows by their first arrival, taking turns."""
    groups: dict[str, list[Waiting[K]]] = {}
    for session in sorted(waiting, key=lambda w: w.since):
        groups.setdefault(session.workflow, []).append(session)
    return take_turns(groups)


def _make_room(session: Waiting[K], idle: Sequence[Idle[K]], slots: int, pages: int) -> tuple[K, ...]:
    """Idle sessions to park, the longest unused first, until `session` fits; all of them if that is not enough."""
    park: list[K] = []
    for resting in sorted(idle, key=lambda i: i.last_used):
        if slots >= 1 and pages >= _pages(session):
            break
        park.append(resting.key)
        slots += 1
        pages += pages_for(resting.consumed)
    return tuple(park)
