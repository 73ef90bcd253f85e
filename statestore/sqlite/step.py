"""A step's commit: generated tokens of many sessions, in one transaction."""

from collections.abc import Sequence
from typing import Final

from forkpoint.errors import LogCorruptError
from forkpoint.ids import SessionName
from forkpoint.statestore.calls import StepCommit, StepOutcome, StepStatus
from forkpoint.statestore.chain import HashChain, pack_tokens
from forkpoint.statestore.logrecord import decode_record, grow_record, write_records
from forkpoint.statestore.records import Kind
from forkpoint.statestore.sqlite import pending
from forkpoint.statestore.sqlite.connection import SqliteConnection
from forkpoint.statestore.sqlite.pending import Pending
from forkpoint.statestore.sqlite.tx import Tx

REMEMBERED_MAX: Final = 16_384
"""Sessions that are remembered from one step to the next: about 16 MB."""


class Steps:
    """Commits steps, and remembers what it wrote of the sessions in them: as long as nobody else writes, the next step
    need not read it again. All in the connection's worker thread."""

    def __init__(self, connection: SqliteConnection) -> None:
        self._connection = connection
        self._rows: dict[tuple[str, str], Pending] = {}
        """By workflow and session: plain strings are hashed once in their life."""
        self._seen: tuple[int, int] | None = None
        """Of the store when `_rows` was true: changes by other connections, and rollbacks of our own."""

    def forget(self) -> None:
        """Something else writes through this connection."""
        self._rows.clear()

    def commit(self, tx: Tx, commits: Sequence[StepCommit]) -> list[StepOutcome]:
        """Catalog.commit_step."""
        seen = (int(tx.db.pragma("data_version")), self._connection.undone)
        if seen != self._seen or len(self._rows) > REMEMBERED_MAX:
            self._rows.clear()
            self._seen = seen
        changed: list[tuple[SessionName, Pending]] = []
        outcomes = [self._commit_one(tx, changed, commit) for commit in commits]
        pending.put(tx, [(name, row) for name, row in changed if row.record])
        return outcomes

    def _commit_one(self, tx: Tx, changed: list[tuple[SessionName, Pending]], commit: StepCommit) -> StepOutcome:
        name = commit.session
        key = (name.workflow, name.session)
        row = self._rows.get(key)
        if row is None:
            row = _find(tx, name)
            if row is None:
                return StepOutcome(StepStatus.CONFLICT, 0, tx.root, 0)
            self._rows[key] = row
        chain = row.chain
        if commit.epoch != row.epoch or row.released:
            return StepOutcome(StepStatus.STALE_EPOCH, chain.position, chain.head_hash(), row.epoch)
        if commit.start != chain.position or row.generation != commit.generation:
            return StepOutcome(StepStatus.CONFLICT, chain.position, chain.head_hash(), row.epoch)
        changed.append((name, row))
        row.update_us = tx.now_us
        _extend(tx, row, commit)
        if commit.finish is not None or row.is_due(len(commit.token_ids)):
            pending.move(tx, name, row)
        if commit.finish is not None:
            _finish(tx, row, commit)
        return StepOutcome(StepStatus.COMMITTED, chain.position, chain.head_hash(), row.epoch)


def _find(tx: Tx, name: SessionName) -> Pending | None:
    """The session's pending tokens, verified, or where they would begin. None for an unknown session."""
    row = pending.find(tx, name)
    if row is not None:
        try:
            decode_record(row.record, row.branch, row.start)
        except ValueError as error:
            raise LogCorruptError(str(name), row.start, row.start, str(error)) from error
        return row
    found = tx.one(
        "SELECT branch, epoch, open_generation, head, grid_hash, tail, owner = '' FROM sessions"
        " WHERE workflow = ? AND session = ?",
        name.workflow,
        name.session,
    )
    if found is None:
        return None
    branch, epoch, generation, head, grid_hash, tail, released = found
    return Pending(branch, epoch, generation, head, HashChain(head, grid_hash, tail), released=bool(released))


def _extend(tx: Tx, row: Pending, commit: StepCommit) -> None:
    """Add a commit's tokens; those that are too many for a short record go to the log at once."""
    tokens, chain = commit.token_ids, row.chain
    if not tokens:
        return
    if len(tokens) >= pending.MOVE_TOKENS:
        pending.move(tx, commit.session, row)
        for start, record in write_records(row.branch, chain, row.epoch, Kind.GENERATED, tokens, commit.logprobs):
            pending.add_record(tx, commit.session, row.branch, start, record)
        pending.move(tx, commit.session, row)
    elif row.record:
        packed = pack_tokens(tokens)
        row.record = grow_record(row.record, packed, commit.logprobs)
        chain.extend_packed(packed)
    else:
        ((_, record),) = write_records(row.branch, chain, row.epoch, Kind.GENERATED, tokens, commit.logprobs)
        pending.begin(tx, commit.session, row, record)


def _finish(tx: Tx, row: Pending, commit: StepCommit) -> None:
    name = commit.session
    assert commit.finish is not None
    tx.run("UPDATE sessions SET open_generation = NULL WHERE workflow = ? AND session = ?", name.workflow, name.session)
    tx.run(
        "UPDATE generations SET finish = ?, stop = ? WHERE workflow = ? AND session = ? AND generation = ?",
        commit.finish.value,
        row.chain.position,
        name.workflow,
        name.session,
        commit.generation,
    )
    row.generation = None
