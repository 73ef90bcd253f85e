"""Which checkpoints are kept, and why. Pure: rows and facts in, verdicts out.

Losing a checkpoint costs a longer replay and nothing else. So a session keeps the last few, then ever fewer the further
they lie behind its head (the ladder), the points where others were forked off, whatever a caller asked for until it
expires, and always the newest one that it, or a session forked from it, could be restored from.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from forkpoint.limits import (
    CHECKPOINTS_KEPT_DEFAULT,
    CHECKPOINTS_KEPT_MAX,
    CHECKPOINTS_KEPT_MIN,
    LADDER_STEP_TOKENS_DEFAULT,
    LADDER_STEP_TOKENS_MAX,
    TILE_TOKENS,
)
from forkpoint.statestore.records import CheckpointRow


class Keep(Enum):
    """Why a checkpoint stays; the first reason that holds, in this order."""

    ANCESTOR = "ANCESTOR"
    """A session needs it: its newest usable one."""
    REQUESTED = "REQUESTED"
    """A caller asked for it, and it has not expired."""
    LAST = "LAST"
    """One of the session's newest."""
    FORK_POINT = "FORK_POINT"
    """A session was forked off behind it."""
    LADDER = "LADDER"
    """The first of its stretch of the log."""


class Drop(Enum):
    """Why a checkpoint goes."""

    EXPIRED = "EXPIRED"
    THINNED = "THINNED"
    """Newer ones, or its neighbours, are enough."""
    OFF_CHAIN = "OFF_CHAIN"
    """The session was rewound below it, and nobody else is on that branch."""
    SESSION_GONE = "SESSION_GONE"
    """Its session was deleted, and can't be undeleted any more."""
    OVER_BUDGET = "OVER_BUDGET"
    """The tier holds more bytes than it may."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of one checkpoint."""

    row: CheckpointRow
    reason: Keep | Drop

    @property
    def stays(self) -> bool:
        """Whether it is kept."""
        return isinstance(self.reason, Keep)


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """A server's defaults. ValueError outside the bounds of forkpoint.limits."""

    keep_last: int = CHECKPOINTS_KEPT_DEFAULT
    """Newest checkpoints of a session that stay; a session's own policy may say another number."""
    ladder_step_tokens: int = LADDER_STEP_TOKENS_DEFAULT
    """Length of the ladder's shortest stretch, a multiple of the tile; 0: no ladder."""

    def __post_init__(self) -> None:
        if not CHECKPOINTS_KEPT_MIN <= self.keep_last <= CHECKPOINTS_KEPT_MAX:
            raise ValueError(f"keep_last is {CHECKPOINTS_KEPT_MIN} to {CHECKPOINTS_KEPT_MAX}, got {self.keep_last}")
        step = self.ladder_step_tokens
        if not 0 <= step <= LADDER_STEP_TOKENS_MAX or step % TILE_TOKENS:
            bound = f"a multiple of {TILE_TOKENS} up to {LADDER_STEP_TOKENS_MAX}"
            raise ValueError(f"ladder_step_tokens is 0 or {bound}, got {step}")


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """One session as retention sees it."""

    head: int
    keep_last: int
    """0: the policy's."""
    gone: bool
    """Deleted, and past its purge time."""
    deleted: bool
    on_chain: frozenset[str]
    """Ids of its checkpoints whose state is on its chain; of a deleted session: none."""


def judge(
    facts: SessionFacts,
    rows: Sequence[CheckpointRow],
    needed: Mapping[str, Keep],
    policy: RetentionPolicy,
    now_us: int,
) -> list[Verdict]:
    """A verdict on each of a session's checkpoints, in the order of `rows`. `needed`: ids of those that any session
    has as its newest usable one (ANCESTOR) or was forked off behind (FORK_POINT)."""
    automatic = [row for row in rows if row.automatic and row.checkpoint in facts.on_chain]
    automatic.sort(key=lambda row: (row.grid_position, row.create_us, row.checkpoint))
    last = _last(automatic, facts.keep_last or policy.keep_last)
    rungs = _ladder(automatic, facts.head, policy.ladder_step_tokens)
    return [Verdict(row, _reason(facts, row, needed, last, rungs, now_us)) for row in rows]


def _reason(
    facts: SessionFacts,
    row: CheckpointRow,
    needed: Mapping[str, Keep],
    last: Collection[str],
    rungs: Collection[str],
    now_us: int,
) -> Keep | Drop:
    need = needed.get(row.checkpoint)
    if need is Keep.ANCESTOR:
        return need
    if row.expire_us is not None and row.expire_us <= now_us:
        return Drop.EXPIRED
    if not row.automatic and not facts.gone:
        return Keep.REQUESTED
    if row.checkpoint in last:
        return Keep.LAST
    if need is not None:
        return need
    if row.checkpoint in rungs:
        return Keep.LADDER
    if facts.gone or facts.deleted:
        return Drop.SESSION_GONE
    return Drop.THINNED if row.checkpoint in facts.on_chain else Drop.OFF_CHAIN


def _last(rows: Sequence[CheckpointRow], count: int) -> set[str]:
    """The newest, one for each state: checkpoints of one grid position and numerics share theirs."""
    newest: dict[tuple[int, str], str] = {}
    for row in reversed(rows):
        newest.setdefault((row.grid_position, row.numerics_id), row.checkpoint)
    return set(list(newest.values())[:count])


def _ladder(rows: Iterable[CheckpointRow], head: int, step: int) -> set[str]:
    """Those that are the first of their stretch of the log; `rows` ascending by position. A stretch begins at an
    absolute multiple of its length, step · 2^r, and ends at least its length behind the head, if it is longer than
    step. As the head grows stretches are only ever joined, and the first of a long stretch was the first of a shorter
    one before: whatever was dropped on the way is not missing later. A replay to a position at distance d, from the
    checkpoint before it, is so about d at most."""
    if step == 0:
        return set()
    rungs: set[str] = set()
    before = -1
    for row in rows:
        if before < _stretch_start(row.grid_position, head, step):
            rungs.add(row.checkpoint)
        before = row.grid_position
    return rungs


def _stretch_start(position: int, head: int, step: int) -> int:
    length = step
    while head - (position // (2 * length) + 1) * 2 * length >= 2 * length:
        length *= 2
    return position // length * length
