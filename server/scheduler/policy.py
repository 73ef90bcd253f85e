"""What one step runs: a pure function of the sessions that want something, the limits, and who was served when.

Continuous batching with chunked prefill. Order of service:

1. decode: sessions that want a sample and have at most one token to consume;
2. prefill of sessions whose generation waits for it (foreground);
3. prefill of appended tokens that nobody waits for (background). A background session that was passed over for
   BACKGROUND_PATIENCE_STEPS counts as foreground, so that it cannot starve.

Within each class workflows take turns, the least recently served first, and a workflow's sessions take turns among
themselves: a workflow with a hundred sessions gets no more than one with a single session while both want service.
A prefill chunk ends at every checkpoint position, because a capture holds the state of the step's end.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from forkpoint.limits import PAGE_TOKENS, PREFILL_CHUNK_TOKENS_DEFAULT
from forkpoint.server.scheduler.history import History, take_turns

K = TypeVar("K", bound=Hashable)

BACKGROUND_PATIENCE_STEPS: Final = 8
"""Steps after which background prefill is served like foreground: an append is consumed in bounded time."""
STEP_SEQUENCES_DEFAULT: Final = 256
"""Sequences of one step: bounds a step's time when very many sessions decode."""


@dataclass(frozen=True, slots=True)
class Candidate(Generic[K]):
    """A resident session that wants something: tokens to consume (consumed < head), a sample, or both.

    `key` is the caller's, unique in the list. `admitted` numbers residents in the order in which they got their slot,
    unique too: the oldest is never parked. `checkpoint_every` in tokens; 0: no automatic checkpoints.
    """

    key: K
    workflow: str
    consumed: int
    head: int
    wants_sample: bool
    checkpoint_every: int
    admitted: int


@dataclass(frozen=True, slots=True)
class Idle(Generic[K]):
    """A resident session that wants nothing now and may be parked. `last_used` grows with use, in any unit."""

    key: K
    consumed: int
    last_used: int


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Bounds of one step.

    `pages_free`: the engine's free pages now. `prefill_tokens`: tokens consumed by prefill, beside the decoding
    sessions' one each. `sequences`: sequences in a step, at least 2, so that decoding and prefill never shut each
    other out.
    """

    pages_free: int
    prefill_tokens: int = PREFILL_CHUNK_TOKENS_DEFAULT
    sequences: int = STEP_SEQUENCES_DEFAULT

    def __post_init__(self) -> None:
        if self.sequences < 2 or self.prefill_tokens < 1 or self.pages_free < 0:
            raise ValueError(f"step limits out of range: {self}")


@dataclass(frozen=True, slots=True)
class Share(Generic[K]):
    """One session's part of a step: consume its tokens [start, start + count), then sample if `sample`.

    `count` is 0 only when `sample` is set: sample again from the stored row of the last consumed position.
    """

    key: K
    start: int
    count: int
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan(Generic[K]):
    """The step to run, and what to do when memory is short.

    `shares`: in order of service, each session at most once; together they need no more than the free pages.
    `park`: sessions to checkpoint and free before the next step, idle ones first, then the youngest. One of them may
    be among `shares` too: it is parked after the step.
    `blocked`: sessions that got no share for lack of pages, in order of service. When it is not empty but `shares` and
    `park` are, and no earlier victim is still being parked, the oldest of them can't fit this node at all.
    `history`: pass it to the next call.
    """

    shares: tuple[Share[K], ...]
    park: tuple[K, ...]
    blocked: tuple[K, ...]
    history: History[K]


def pages_for(position: int) -> int:
    """Pages that `position` tokens occupy."""
    return -(-position // PAGE_TOKENS)


def chunk_end(consumed: int, head: int, budget: int, checkpoint_every: int) -> int:
    """Where a prefill chunk ends: at most `budget` tokens on, never past the head nor past a checkpoint position."""
    end = min(head, consumed + budget)
    if checkpoint_every > 0:
        end = min(end, (consumed // checkpoint_every + 1) * checkpoint_every)
    return end


def plan_step(
    candidates: Sequence[Candidate[K]], limits: StepLimits, history: History[K], idle: Sequence[Idle[K]] = ()
) -> StepPlan[K]:
    """Plan one step. Deterministic: equal arguments, equal plan, whatever the order of the lists.

    Raises ValueError for two candidates with one key or one `admitted` number, or consumed > head: bugs of the caller.
    """
    _check(candidates)
    classes = {c.key: _class_of(c, history) for c in candidates}
    decoding = [c for c in candidates if classes[c.key] == DECODE]
    prefilling = [c for c in candidates if classes[c.key] in (FOREGROUND, BACKGROUND)]
    room = _Room(limits.pages_free, limits.prefill_tokens)
    shares: list[Share[K]] = []
    blocked: list[Candidate[K]] = []
    # Decoding leaves one place for prefill, else a full house of decoders would shut it out for good.
    places = limits.sequences - (1 if prefilling else 0)
    for candidate in _in_order(decoding, DECODE, history)[:places]:
        _give(candidate, room, shares, blocked)
    for work in (FOREGROUND, BACKGROUND):
        for candidate in _in_order([c for c in prefilling if classes[c.key] == work], work, history):
            if len(shares) < limits.sequences and room.tokens > 0:
                _give(candidate, room, shares, blocked)
    park = _victims(blocked, room.pages, candidates, idle)
    listed = [(c.key, c.workflow, classes[c.key]) for c in candidates]
    after = history.after(listed, [share.key for share in shares])
    return StepPlan(tuple(shares), park, tuple(c.key for c in blocked), after)


DECODE: Final = "decode"
FOREGROUND: Final = "foreground"
BACKGROUND: Final = "background"
NOTHING: Final = "nothing"


@dataclass(slots=True)
class _Room:
    """What is left of the step while shares are given."""

    pages: int
    tokens: int


def _check(candidates: Sequence[Candidate[K]]) -> None:
    if len({c.key for c in candidates}) != len(candidates) or len({c.admitted for c in candidates}) != len(candidates):
        raise ValueError("two candidates have the same key or the same admission number")
    for candidate in candidates:
        if not 0 <= candidate.consumed <= candidate.head:
            raise ValueError(f"consumed {candidate.consumed} is beyond the head {candidate.head} of {candidate.key!r}")


def _class_of(candidate: Candidate[K], history: History[K]) -> str:
    backlog = candidate.head - candidate.consumed
    if candidate.wants_sample and backlog <= 1:
        return DECODE
    if backlog == 0:
        return NOTHING
    if candidate.wants_sample or history.waited(candidate.key) >= BACKGROUND_PATIENCE_STEPS:
        return FOREGROUND
    return BACKGROUND


def _in_order(candidates: Iterable[Candidate[K]], work: str, history: History[K]) -> list[Candidate[K]]:
    """Workflows by their last turn at this class of work, each one's sessions by how long they wait."""
    groups: dict[str, list[Candidate[K]]] = {}
    for candidate in candidates:
        groups.setdefault(candidate.workflow, []).append(candidate)
    for members in groups.values():
        members.sort(key=lambda c: (-history.waited(c.key), c.admitted))
    order = sorted(groups, key=lambda workflow: (history.turn(workflow, work), workflow))
    return take_turns({workflow: groups[workflow] for workflow in order})


def _give(candidate: Candidate[K], room: _Room, shares: list[Share[K]], blocked: list[Candidate[K]]) -> None:
    """Give the candidate what the room allows, or note that pages lack."""
    start, backlog = candidate.consumed, candidate.head - candidate.consumed
    decoding = candidate.wants_sample and backlog <= 1
    end = candidate.head if decoding else chunk_end(start, candidate.head, room.tokens, candidate.checkpoint_every)
    held = pages_for(start)
    end = min(end, (held + room.pages) * PAGE_TOKENS)
    if end == start and backlog > 0:
        blocked.append(candidate)
        return
    room.pages -= pages_for(end) - held
    room.tokens -= 0 if decoding else end - start
    shares.append(Share(candidate.key, start, end - start, candidate.wants_sample and end == candidate.head))


def _victims(
    blocked: Sequence[Candidate[K]], pages_left: int, candidates: Sequence[Candidate[K]], idle: Sequence[Idle[K]]
) -> tuple[K, ...]:
    """Whom to park so that the oldest blocked session gets a page: idle sessions, the longest unused first, then
    sessions admitted after it, the youngest first. Never an older one, so that two can't park each other in turn.

    Pages count as freed in full, though forks may share them: if too few come free, the next plan parks more.
    """
    if not blocked:
        return ()
    first = min(blocked, key=lambda c: c.admitted)
    missing = 1 - pages_left
    park: list[K] = []
    resting = [(i.key, i.consumed) for i in sorted(idle, key=lambda i: i.last_used)]
    younger = sorted((c for c in candidates if c.admitted > first.admitted), key=lambda c: -c.admitted)
    for key, consumed in resting + [(c.key, c.consumed) for c in younger]:
        if missing <= 0:
            break
        if consumed > 0:
            park.append(key)
            missing -= pages_for(consumed)
    return tuple(park)
