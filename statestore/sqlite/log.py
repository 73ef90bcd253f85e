"""The token log: appends, and verified reads across ancestors."""

from collections.abc import Iterator, Sequence
from typing import Final

from forkpoint.errors import LogCorruptError, SessionBusyError
from forkpoint.ids import SessionName
from forkpoint.limits import TILE_TOKENS
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.logrecord import (
    RECORD_TOKENS_MAX,
    StoredRecord,
    chain_at,
    read_stretch,
    write_records,
)
from forkpoint.statestore.records import Kind, LogSlice
from forkpoint.statestore.rules import check_expected, check_owned, check_position
from forkpoint.statestore.sqlite import pending, sessions
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
    """Records of a session's branch and its ancestors, as far back as a read from `start` needs. Only its own branch
    can have pending tokens that count: a fork moves its parent's into the log."""

    def __init__(self, tx: Tx, stored: StoredSession, start: int) -> None:
        self._tx = tx
        self._pending = stored.pending
        lowest = max(0, start - _LOOK_BACK)
        rows = tx.rows(_ANCESTRY, stored.branch, stored.row.head, lowest)
        self._parts = [(int(branch), int(begin), int(cut)) for branch, begin, cut in rows]

    def covering(self, position: int) -> int | None:
        """RecordSource.covering."""
        if self._pending is not None and position >= self._pending.start:
            return self._pending.start
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
            if self._pending is not None and branch == self._pending.branch and first >= self._pending.start:
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
        if (last := self._pending) is not None and last.start < stop:
            yield StoredRecord(last.branch, last.start, last.chain.position, last.record)


def position_chain(tx: Tx, stored: StoredSession, position: int) -> HashChain:
    """The chain at a position of the session's log. Raises LogCorruptError."""
    if position == stored.chain.position:
        return stored.chain.copy()
    records = BranchRecords(tx, stored, position - 1)
    return chain_at(str(stored.row.name), records, tx.root, position)


def read(tx: Tx, name: SessionName, start: int, limit: int) -> LogSlice:
    """Catalog.read_log."""
    stored = sessions.live(tx, name)
    head = stored.row.head
    check_position(name, start, head)
    stop = min(head, start + limit)
    if stop <= start:
        return LogSlice(start, (), (), ())
    stretch = read_stretch(str(name), BranchRecords(tx, stored, start), start, stop)
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
        pending.add_record(tx, name, branch, start, record)


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
    check_owned(row, epoch)
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
