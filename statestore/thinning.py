"""Retention applied to a catalog: workflow by workflow, judged by its tree of sessions as it was."""

from collections import defaultdict
from collections.abc import AsyncIterator, Collection
from dataclasses import dataclass
from typing import Final

from forkpoint.ids import SessionName
from forkpoint.limits import TILE_TOKENS
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.records import CheckpointRow, SessionRow, SessionState
from forkpoint.statestore.retention import Keep, RetentionPolicy, SessionFacts, Verdict, judge
from forkpoint.statestore.scan import all_checkpoints, all_sessions

TRIES: Final = 3
"""A tree that grows while it is judged is judged again so often, then left for the next time."""
DROP_MAX: Final = 1000
"""Rows of one transaction."""
Needs = dict[SessionName, dict[str, Keep]]


@dataclass(frozen=True, slots=True)
class Thinned:
    """One workflow: its verdicts, and whether they were carried out. They are not when they were only asked for, or
    when the workflow's tree kept growing meanwhile."""

    workflow: str
    lineage: int
    """Of the tree that was judged."""
    verdicts: tuple[Verdict, ...]
    done: bool


async def all_workflows(catalog: Catalog) -> AsyncIterator[str]:
    """Every workflow that ever had a session, ascending: deleted ones too."""
    last: str | None = None
    async for row in all_sessions(catalog):
        if row.name.workflow != last:
            last = row.name.workflow
            yield last


async def thin(
    catalog: Catalog,
    workflow: str,
    policy: RetentionPolicy,
    serving: Collection[str],
    now_us: int,
    dry_run: bool = False,
) -> Thinned:
    """Judge every checkpoint of a workflow and drop the rows of those that go. `serving`: numerics ids of the nodes
    there are; each session keeps a usable checkpoint for each of them."""
    tries = TRIES
    while True:
        tries -= 1
        lineage = await catalog.lineage(workflow)
        verdicts = tuple(await judge_workflow(catalog, workflow, policy, serving, now_us))
        done = not dry_run and await drop(catalog, workflow, lineage, verdicts)
        if done or dry_run or tries == 0:
            return Thinned(workflow, lineage, verdicts, done)


async def drop(catalog: Catalog, workflow: str, lineage: int, verdicts: Collection[Verdict]) -> bool:
    """Remove the rows that go. False when the tree has grown since: then some may be removed, all of them rightly."""
    gone = [(v.row.session.session, v.row.checkpoint) for v in verdicts if not v.stays]
    for offset in range(0, len(gone), DROP_MAX):
        if not await catalog.drop_checkpoints(workflow, lineage, gone[offset : offset + DROP_MAX]):
            return False
    return True


async def judge_workflow(
    catalog: Catalog, workflow: str, policy: RetentionPolicy, serving: Collection[str], now_us: int
) -> list[Verdict]:
    """A verdict on every checkpoint of a workflow, ascending by session."""
    rows: dict[SessionName, list[CheckpointRow]] = defaultdict(list)
    async for checkpoint in all_checkpoints(catalog, workflow):
        rows[checkpoint.session].append(checkpoint)
    if not rows:
        return []
    sessions = {row.name: row async for row in all_sessions(catalog, workflow)}
    chains: dict[SessionName, list[CheckpointRow]] = {}
    needs: Needs = defaultdict(dict)
    for name, session in sessions.items():
        alive = session.state is not SessionState.DELETED
        chains[name] = await catalog.list_checkpoints(name) if alive and name in rows else []
        if not _gone(session, now_us):
            await _note_needs(catalog, session, chains[name], serving, needs)
    verdicts: list[Verdict] = []
    for name, theirs in rows.items():
        facts = _facts(sessions.get(name), chains.get(name, []), now_us)
        verdicts += judge(facts, theirs, needs[name], policy, now_us)
    return verdicts


def _gone(session: SessionRow, now_us: int) -> bool:
    return session.state is SessionState.DELETED and (session.purge_us or 0) <= now_us


def _facts(session: SessionRow | None, chain: list[CheckpointRow], now_us: int) -> SessionFacts:
    if session is None:
        return SessionFacts(0, 0, True, True, frozenset())
    return SessionFacts(
        head=session.head,
        keep_last=session.policy.keep_last,
        gone=_gone(session, now_us),
        deleted=session.state is SessionState.DELETED,
        on_chain=frozenset(row.checkpoint for row in chain),
    )


async def _note_needs(
    catalog: Catalog, session: SessionRow, own: list[CheckpointRow], serving: Collection[str], needs: Needs
) -> None:
    """Whatever the session would be restored from, by any of the nodes, at its head and below it; and the checkpoint
    that it was forked off behind."""
    if session.parent is not None:
        found = await catalog.nearest_checkpoint(session.name, session.fork_position)
        if found is not None:
            needs[found.session].setdefault(found.checkpoint, Keep.FORK_POINT)
    limits = {session.head, session.head - 1} if session.head % TILE_TOKENS == 0 else {session.head}
    for limit in limits:
        for numerics_id in (None, *serving):
            found = _newest(own, limit, numerics_id)
            if found is None or found.grid_position < session.fork_position:
                found = await catalog.nearest_checkpoint(session.name, limit, numerics_id)
            if found is not None:
                needs[found.session][found.checkpoint] = Keep.ANCESTOR


def _newest(rows: list[CheckpointRow], limit: int, numerics_id: str | None) -> CheckpointRow | None:
    usable = [row for row in rows if row.grid_position <= limit and numerics_id in (None, row.numerics_id)]
    return max(usable, key=lambda row: row.grid_position, default=None)
