"""What only SQL sees: broken pages, rows that point at nothing, and sums that do not add up."""

from collections.abc import Iterator
from typing import Final

from forkpoint.statestore.findings import Finding, Severity
from forkpoint.statestore.sqlite.tx import Tx

_QUERIES: Final = (
    (
        "WRONG_PARENT",
        "a branch's parent does not exist or begins at or behind the fork",
        "SELECT 'branch ' || b.branch FROM branches b LEFT JOIN branches p ON p.branch = b.parent"
        " WHERE (b.parent IS NULL AND b.fork_position != 0)"
        " OR (b.parent IS NOT NULL AND (p.branch IS NULL OR p.fork_position >= b.fork_position"
        " OR p.workflow != b.workflow))",
    ),
    (
        "ORPHAN_LOG",
        "log records of a branch that does not exist, or before its fork",
        "SELECT DISTINCT 'branch ' || l.branch FROM log l LEFT JOIN branches b ON b.branch = l.branch"
        " WHERE b.branch IS NULL OR l.start < b.fork_position",
    ),
    (
        "ORPHAN_BRANCH",
        "a session's branch does not exist",
        "SELECT workflow || '/' || session FROM sessions WHERE branch NOT IN (SELECT branch FROM branches)",
    ),
    (
        "OPEN_GENERATION",
        "the session's open generation is not the unfinished one",
        "SELECT s.workflow || '/' || s.session FROM sessions s WHERE s.open_generation IS NOT"
        " (SELECT max(g.generation) FROM generations g WHERE g.workflow = s.workflow AND g.session = s.session"
        " AND g.finish IS NULL)",
    ),
    (
        "GENERATION_BEYOND_HEAD",
        "an unfinished generation starts beyond the head",
        "SELECT g.workflow || '/' || g.session || ' generation ' || g.generation FROM generations g"
        " JOIN sessions s USING (workflow, session) WHERE g.finish IS NULL AND g.start > s.head",
    ),
    (
        "GENERATION_RANGE",
        "a generation ends before it starts",
        "SELECT workflow || '/' || session || ' generation ' || generation FROM generations WHERE stop < start",
    ),
    (
        "MANIFEST_MISSING",
        "a checkpoint names a manifest that does not exist",
        "SELECT workflow || '/' || session || '/' || checkpoint FROM checkpoints c WHERE NOT EXISTS"
        " (SELECT 1 FROM manifests m WHERE m.chain_hash = c.chain_hash AND m.grid_position = c.grid_position"
        " AND m.numerics_id = c.numerics_id)",
    ),
    (
        "PENDING_TOKENS",
        "tokens that wait to go into the log are not where it ends, or of no open generation",
        "SELECT p.workflow || '/' || p.session FROM pending p LEFT JOIN sessions s USING (workflow, session)"
        " WHERE s.branch IS NOT p.branch OR s.epoch IS NOT p.epoch OR s.open_generation IS NOT p.generation"
        " OR s.head IS NOT p.start OR p.head <= p.start",
    ),
    (
        "ORPHAN_SESSION",
        "a session's workflow does not exist",
        "SELECT workflow || '/' || session FROM sessions WHERE workflow NOT IN (SELECT workflow FROM workflows)",
    ),
)

_EPOCHS: Final = (
    "SELECT DISTINCT s.workflow || '/' || s.session, s.epoch, substr(l.record, 25, 8) FROM sessions s"
    " JOIN log l ON l.branch = s.branch"
)
"""Session, its epoch, and each epoch (bytes 24 to 31, docs/formats.md) that records of its own branch bear."""


def findings(tx: Tx) -> list[Finding]:
    """Everything wrong that one of the queries or SQLite itself sees."""
    found = [
        Finding(Severity.ERROR, "DATABASE", "sqlite", str(row[0]))
        for row in tx.rows("PRAGMA integrity_check(20)")
        if row[0] != "ok"
    ]
    for kind, detail, sql in _QUERIES:
        found.extend(Finding(Severity.ERROR, kind, str(row[0]), detail) for row in tx.rows(sql))
    return [*found, *_late_records(tx)]


def _late_records(tx: Tx) -> Iterator[Finding]:
    """Log records under an epoch that their session has not reached: nobody may have written them."""
    for name, epoch, written in tx.rows(_EPOCHS):
        record_epoch = int.from_bytes(bytes(written), "little")
        if record_epoch > int(epoch):
            detail = f"a log record is of epoch {record_epoch}, the session is at {epoch}"
            yield Finding(Severity.ERROR, "WRONG_EPOCH", str(name), detail)
