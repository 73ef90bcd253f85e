"""Generated tokens on their way into the log: a row for each session that has some, in a table of their own.

A step adds a token to each of many sessions. Written to `log` and `sessions` at once, each token would cost three pages
of the write-ahead log, because no two sessions share a page there. Rows here are short and lie side by side. A row is a
log record that still grows. It moves into `log`, and the session's row catches up, once it is long, when the generation
ends, and before anything else is written about its session. So without a row here a session is wholly in `sessions` and
`log`; with one, its `sessions` row is as it was when the record began, epoch and open generation too.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from forkpoint.errors import LogCorruptError
from forkpoint.ids import SessionName
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.sqlite.tx import Tx

MOVE_TOKENS: Final = 32
"""A record of so many tokens moves into the log, at the next position where it is its branch's turn."""
_COLUMNS: Final = "workflow, session, branch, epoch, generation, start, head, grid_hash, tail, update_us, record"
_BY_NAME: Final = "WHERE workflow = ? AND session = ?"


@dataclass(slots=True)
class Pending:
    """Tokens [start, chain.position) of a branch: a log record, or b"" while there are none."""

    branch: int
    epoch: int
    generation: str | None
    """The session's open one."""
    start: int
    chain: HashChain
    update_us: int = 0
    record: bytes = b""
    released: bool = False
    """Its owner gave the session up: nothing is pending."""

    def is_due(self, added: int) -> bool:
        """Whether it moves now, `added` tokens having come. Branches take turns by their number: sessions that run in
        step do not all move in the same one."""
        held = self.chain.position - self.start
        if held < MOVE_TOKENS:
            return False
        return held >= 2 * MOVE_TOKENS or (self.chain.position + self.branch) % MOVE_TOKENS < added


def find(tx: Tx, name: SessionName) -> Pending | None:
    """What is pending of a session."""
    row = tx.one(
        f"SELECT branch, epoch, generation, start, head, grid_hash, tail, update_us, record FROM pending {_BY_NAME}",
        name.workflow,
        name.session,
    )
    if row is None:
        return None
    branch, epoch, generation, start, head, grid_hash, tail, update_us, record = row
    return Pending(branch, epoch, generation, start, HashChain(head, grid_hash, tail), update_us, record)


def put(tx: Tx, rows: Iterable[tuple[SessionName, Pending]]) -> None:
    """Write the rows of many sessions."""
    tx.db.executemany(
        f"INSERT OR REPLACE INTO pending ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [_values(name, row) for name, row in rows],
    )


def _values(name: SessionName, row: Pending) -> tuple[Any, ...]:
    chain = row.chain
    return (
        name.workflow,
        name.session,
        row.branch,
        row.epoch,
        row.generation,
        row.start,
        chain.position,
        chain.grid_hash,
        chain.tail,
        row.update_us,
        row.record,
    )


def begin(tx: Tx, name: SessionName, row: Pending, record: bytes) -> None:
    """Let the session's first pending tokens be a record. Raises LogCorruptError when the log goes on there."""
    _check_end(tx, name, row)
    row.record = record


def _check_end(tx: Tx, name: SessionName, row: Pending) -> None:
    if tx.one("SELECT 1 FROM log WHERE branch = ? AND start >= ?", row.branch, row.start):
        raise LogCorruptError(str(name), row.start, row.start, "the log goes on behind the session's head")


def move(tx: Tx, name: SessionName, row: Pending) -> None:
    """Put the record into the log and the session's row at its end; `row` is left without tokens. Raises
    LogCorruptError when the log goes on there already."""
    if row.record:
        _check_end(tx, name, row)
    _move(tx, name, row)


def settle(tx: Tx, name: SessionName) -> None:
    """Move what is pending of a session, if anything: before anything else is written about it. A log that goes on
    where it should end keeps nobody from taking or closing the session: whoever reads the log finds out."""
    row = find(tx, name)
    if row is not None:
        _move(tx, name, row)


def _move(tx: Tx, name: SessionName, row: Pending) -> None:
    chain = row.chain
    if row.record:
        tx.run(f"DELETE FROM pending {_BY_NAME}", name.workflow, name.session)
        sql = "INSERT OR REPLACE INTO log (branch, start, record) VALUES (?, ?, ?)"
        tx.run(sql, row.branch, row.start, row.record)
    tx.run(
        f"UPDATE sessions SET head = ?, grid_hash = ?, tail = ?, update_us = ? {_BY_NAME}",
        chain.position,
        chain.grid_hash,
        chain.tail,
        row.update_us,
        name.workflow,
        name.session,
    )
    row.start, row.record = chain.position, b""


def add_record(tx: Tx, name: SessionName, branch: int, start: int, record: bytes) -> None:
    """A record of the log. Raises LogCorruptError when there is one."""
    if not tx.run("INSERT OR IGNORE INTO log (branch, start, record) VALUES (?, ?, ?)", branch, start, record):
        raise LogCorruptError(str(name), start, start, "the log goes on behind the session's head")
