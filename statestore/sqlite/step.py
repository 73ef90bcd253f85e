"""A step's commit: generated tokens of many sessions, in one transaction."""

from collections.abc import Sequence

from forkpoint.errors import LogCorruptError
from forkpoint.ids import SessionName
from forkpoint.statestore.calls import StepCommit, StepOutcome, StepStatus
from forkpoint.statestore.chain import HashChain, pack_tokens
from forkpoint.statestore.logrecord import grow_record, write_records
from forkpoint.statestore.records import Kind
from forkpoint.statestore.sqlite import pending
from forkpoint.statestore.sqlite.pending import Pending
from forkpoint.statestore.sqlite.tx import Tx


def commit(tx: Tx, commits: Sequence[StepCommit]) -> list[StepOutcome]:
    """Catalog.commit_step."""
    rows: dict[SessionName, Pending] = {}
    outcomes = [_commit_one(tx, rows, commit) for commit in commits]
    pending.put(tx, {name: row for name, row in rows.items() if row.record})
    return outcomes


def _commit_one(tx: Tx, rows: dict[SessionName, Pending], commit: StepCommit) -> StepOutcome:
    name = commit.session
    row = rows.get(name)
    if row is None:
        row = _find(tx, name)
        if row is None:
            return StepOutcome(StepStatus.CONFLICT, 0, tx.root, 0)
        rows[name] = row
    chain = row.chain
    if commit.epoch != row.epoch:
        return StepOutcome(StepStatus.STALE_EPOCH, chain.position, chain.head_hash(), row.epoch)
    if commit.start != chain.position or row.generation != commit.generation:
        return StepOutcome(StepStatus.CONFLICT, chain.position, chain.head_hash(), row.epoch)
    row.update_us = tx.now_us
    _extend(tx, row, commit)
    if commit.finish is not None or row.is_due(len(commit.token_ids)):
        pending.move(tx, name, row)
    if commit.finish is not None:
        _finish(tx, row, commit)
    return StepOutcome(StepStatus.COMMITTED, chain.position, chain.head_hash(), row.epoch)


def _find(tx: Tx, name: SessionName) -> Pending | None:
    """The session's pending tokens, or where they would begin. None for an unknown session."""
    row = pending.find(tx, name)
    if row is not None:
        return row
    found = tx.one(
        "SELECT branch, epoch, open_generation, head, grid_hash, tail FROM sessions WHERE workflow = ? AND session = ?",
        name.workflow,
        name.session,
    )
    if found is None:
        return None
    branch, epoch, generation, head, grid_hash, tail = found
    return Pending(branch, epoch, generation, head, HashChain(head, grid_hash, tail))


def _extend(tx: Tx, row: Pending, commit: StepCommit) -> None:
    """Add a commit's tokens; those that are too many for a short record go to the log at once."""
    tokens, chain = commit.token_ids, row.chain
    if len(tokens) >= pending.MOVE_TOKENS:
        pending.move(tx, commit.session, row)
        for start, record in write_records(row.branch, chain, row.epoch, Kind.GENERATED, tokens, commit.logprobs):
            pending.add_record(tx, commit.session, row.branch, start, record)
        pending.move(tx, commit.session, row)
    elif not tokens:
        return
    elif not row.record:
        ((_, record),) = write_records(row.branch, chain, row.epoch, Kind.GENERATED, tokens, commit.logprobs)
        pending.begin(tx, commit.session, row, record)
    else:
        try:
            row.record = grow_record(row.record, row.branch, row.start, tokens, commit.logprobs)
        except ValueError as error:
            raise LogCorruptError(str(commit.session), row.start, row.start, str(error)) from error
        chain.extend_packed(pack_tokens(tokens))


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
