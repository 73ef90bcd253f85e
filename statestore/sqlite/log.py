"""The token log: appends, verified reads across ancestors, and the step's commit."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from forkpoint.errors import LogCorruptError, SessionBusyError
from forkpoint.ids import SessionName
from forkpoint.limits import TILE_TOKENS
from forkpoint.statestore.calls import StepCommit, StepOutcome, StepStatus
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.logrecord import (
    RECORD_TOKENS_MAX,
    StoredRecord,
    chain_at,
    read_stretch,
    write_records,
)
from forkpoint.statestore.records import Kind, LogSlice
from forkpoint.statestore.rules import check_epoch, check_expected, check_position
from forkpoint.statestore.sqlite import sessions
from forkpoint.statestore.sqlite.sessions import StoredSession
from forkpoint.statestore.sqlite.tx import Tx

_LOOK_BACK: Final = RECORD_TOKENS_MAX + TILE_TOKENS
"""No read that begins at p needs anything before p - this (logrecord.read_stretch)."""
_ANCESTRY: Final = """
WITH RECURSIVE up (branch, parent, begin, cut) AS (
    SELECT branch, parent, fork_position, ?2 FROM branches WHERE branch = ?1
    UNION ALL
    SELECT b.branch, b.parent, b.fork_position, up.begin FROM up JOIN branches AS b ON b.branch = up.parent
    WHERE up.begin > ?3
)
SELECT branch, begin, cut FROM up ORDER BY cut, begin
"""


class BranchRecords:
    """Records of a branch and its ancestors, as far back as a read from `start` needs."""

    def __init__(self, tx: Tx, branch: int, head: int, start: int) -> None:
        self._tx = tx
        lowest = max(0, start - _LOOK_BACK)
        self._parts = [(int(b), int(begin), int(cut)) for b, begin, cut in tx.rows(_ANCESTRY, branch, head, lowest)]

    def covering(self, position: int) -> int | None:
        """RecordSource.covering."""
        for branch, begin, cut in self._parts:
            if begin <= position < cut:
                row = self._tx.one("SELECT max(start) FROM log WHERE branch = ? AND start <= ?", branch, position)
                return None if row is None or row[0] is None else int(row[0])
        return None

    def between(self, first: int, stop: int) -> Iterator[StoredRecord]:
        """RecordSource.between."""
        for branch, begin, cut in self._parts:
            if cut <= first or begin >= stop:
                continue
            rows = self._tx.rows(
                "SELECT start, record FROM log WHERE branch = ?1 AND start < ?3 AND start >="
                " coalesce((SELECT max(start) FROM log WHERE branch = ?1 AND start <= ?2), 0) ORDER BY start",
                branch,
                first,
                min(stop, cut),
            )
            for start, data in rows:
                yield StoredRecord(branch, start, cut, data)


def position_chain(tx: Tx, stored: StoredSession, position: int) -> HashChain:
    """The chain at a position of the session's log. Raises LogCorruptError."""
    if position == stored.chain.position:
        return stored.chain.copy()
    records = BranchRecords(tx, stored.branch, stored.row.head, position - 1)
    return chain_at(str(stored.row.name), records, tx.root, position)


def read(tx: Tx, name: SessionName, start: int, limit: int) -> LogSlice:
    """Catalog.read_log."""
    stored = sessions.live(tx, name)
    head = stored.row.head
    check_position(name, start, head)
    stop = min(head, start + limit)
    if stop <= start:
        return LogSlice(start, (), (), ())
    stretch = read_stretch(str(name), BranchRecords(tx, stored.branch, head, start), start, stop)
    if stop == head:
        _check_head(tx, stored, stretch.chain)
    return stretch.slice(start)


def _check_head(tx: Tx, stored: StoredSession, chain: HashChain | None) -> None:
    """The session's head is the end of its log, in tokens and in hash."""
    name, head = str(stored.row.name), stored.row.head
    if chain is None or chain.head_hash() != stored.row.head_hash:
        grid = head - head % TILE_TOKENS
        raise LogCorruptError(name, grid, grid, "the log does not lead to the session's head hash")
    if tx.one("SELECT 1 FROM log WHERE branch = ? AND start >= ?", stored.branch, head):
        raise LogCorruptError(name, head, head, "the log goes on behind the session's head")


def write(
    tx: Tx,
    name: SessionName,
    branch: int,
    chain: HashChain,
    epoch: int,
    kind: Kind,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None] = (),
) -> None:
    """Append records and move `chain` to their end; the session's row is the caller's to move."""
    for start, record in write_records(branch, chain, epoch, kind, token_ids, logprobs):
        if not tx.run("INSERT OR IGNORE INTO log (branch, start, record) VALUES (?, ?, ?)", branch, start, record):
            raise LogCorruptError(str(name), start, start, "the log goes on behind the session's head")


def append_at_head(
    tx: Tx,
    stored: StoredSession,
    epoch: int,
    token_ids: Sequence[int],
    kind: Kind,
    expected_position: int | None,
    expected_head_hash: bytes | None,
    logprobs: Sequence[float | None] = (),
) -> HashChain:
    """The checks and the writes that append and begin_generation share. Returns the chain at the new head."""
    row = stored.row
    check_epoch(row.name, epoch, row.epoch)
    if stored.open_generation is not None:
        raise SessionBusyError(str(row.name), f"generation {stored.open_generation}", row.head)
    check_expected(row.name, row.head, row.head_hash, stored.rewound_from, expected_position, expected_head_hash)
    chain = stored.chain.copy()
    if token_ids:
        write(tx, row.name, stored.branch, chain, epoch, kind, token_ids, logprobs)
        move_head(tx, row.name, chain)
    return chain


def move_head(tx: Tx, name: SessionName, chain: HashChain) -> None:
    """Point the session's row at the chain's end."""
    tx.run(
        "UPDATE sessions SET head = ?, grid_hash = ?, tail = ?, update_us = ? WHERE workflow = ? AND session = ?",
        chain.position,
        chain.grid_hash,
        chain.tail,
        tx.now_us,
        name.workflow,
        name.session,
    )


def commit_step(tx: Tx, commits: Sequence[StepCommit]) -> list[StepOutcome]:
    """Catalog.commit_step."""
    return [_commit_one(tx, commit) for commit in commits]


def _commit_one(tx: Tx, commit: StepCommit) -> StepOutcome:
    name = commit.session
    found: tuple[Any, ...] | None = tx.one(
        "SELECT branch, epoch, head, grid_hash, tail, open_generation FROM sessions WHERE workflow = ? AND session = ?",
        name.workflow,
        name.session,
    )
    if found is None:
        return StepOutcome(StepStatus.CONFLICT, 0, tx.root, 0)
    branch, epoch, head, grid_hash, tail, generation = found
    chain = HashChain(head, grid_hash, tail)
    if commit.epoch != epoch:
        return StepOutcome(StepStatus.STALE_EPOCH, head, chain.head_hash(), epoch)
    if commit.start != head or generation != commit.generation:
        return StepOutcome(StepStatus.CONFLICT, head, chain.head_hash(), epoch)
    write(tx, name, branch, chain, epoch, Kind.GENERATED, commit.token_ids, commit.logprobs)
    tx.run(
        "UPDATE sessions SET head = ?, grid_hash = ?, tail = ?, update_us = ?, open_generation = ?"
        " WHERE workflow = ? AND session = ?",
        chain.position,
        chain.grid_hash,
        chain.tail,
        tx.now_us,
        generation if commit.finish is None else None,
        name.workflow,
        name.session,
    )
    if commit.finish is not None:
        tx.run(
            "UPDATE generations SET finish = ?, stop = ? WHERE workflow = ? AND session = ? AND generation = ?",
            commit.finish.value,
            chain.position,
            name.workflow,
            name.session,
            generation,
        )
    return StepOutcome(StepStatus.COMMITTED, chain.position, chain.head_hash(), epoch)
