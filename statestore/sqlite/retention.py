"""What retention asks: all checkpoints of a workflow, which of them a session needs, and their removal."""

from collections.abc import Iterator, Sequence
from typing import Any

from forkpoint.ids import SessionName
from forkpoint.statestore.records import CheckpointRow
from forkpoint.statestore.sqlite import checkpoints, sessions
from forkpoint.statestore.sqlite.tx import Tx


def scan(tx: Tx, workflow: str, after: tuple[str, str] | None, limit: int) -> list[CheckpointRow]:
    """Catalog.scan_checkpoints."""
    rows = tx.rows(
        f"SELECT {checkpoints.COLUMNS} FROM checkpoints WHERE workflow = ? AND (session, checkpoint) > (?, ?)"
        " ORDER BY session, checkpoint LIMIT ?",
        workflow,
        *(after or ("", "")),
        limit,
    )
    return [checkpoints.row_of(row) for row in rows]


def nearest(tx: Tx, name: SessionName, position: int, numerics_id: str | None) -> CheckpointRow | None:
    """Catalog.nearest_checkpoint."""
    stored = sessions.load(tx, name)
    best: CheckpointRow | None = None
    for maker, limit in _ancestry(tx, name, min(position, stored.row.head)):
        floor = -1 if best is None else best.grid_position
        for row in _below(tx, maker, floor, limit, numerics_id):
            if checkpoints.on_chain(tx, stored, row):
                best = checkpoints.row_of(row)
                break
    return best


def _ancestry(tx: Tx, name: SessionName, limit: int) -> Iterator[tuple[SessionName, int]]:
    """The session and those it descends from, each with the highest position that may be shared with it."""
    seen: set[str] = set()
    session: str | None = name.session
    while session is not None and session not in seen:
        seen.add(session)
        yield SessionName(name.workflow, session), limit
        sql = "SELECT parent, fork_position FROM sessions WHERE workflow = ? AND session = ?"
        session, fork_position = tx.one(sql, name.workflow, session) or (None, 0)
        limit = min(limit, fork_position)


def _below(tx: Tx, maker: SessionName, floor: int, limit: int, numerics_id: str | None) -> list[tuple[Any, ...]]:
    """Rows made under a name in (floor, limit], the highest first."""
    return tx.rows(
        f"SELECT {checkpoints.COLUMNS} FROM checkpoints WHERE workflow = ? AND session = ? AND grid_position > ?"
        " AND grid_position <= ? AND (?5 IS NULL OR numerics_id = ?5)"
        " ORDER BY grid_position DESC, position, create_us, checkpoint",
        maker.workflow,
        maker.session,
        floor,
        limit,
        numerics_id,
    )


def lineage(tx: Tx, workflow: str) -> int:
    """Catalog.lineage: branches are numbered as they come, and every session made, forked or rewound takes one."""
    row = tx.one("SELECT max(branch) FROM branches WHERE workflow = ?", workflow)
    return int(row[0]) if row is not None and row[0] is not None else 0


def drop(tx: Tx, workflow: str, seen: int, rows: Sequence[tuple[str, str]]) -> bool:
    """Catalog.drop_checkpoints."""
    if lineage(tx, workflow) != seen:
        return False
    for session, checkpoint in rows:
        sql = "DELETE FROM checkpoints WHERE workflow = ? AND session = ? AND checkpoint = ?"
        tx.run(sql, workflow, session, checkpoint)
    return True
