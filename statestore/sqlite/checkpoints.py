"""Checkpoints of sessions, and the manifests they name."""

from collections.abc import Sequence
from typing import Any, Final

from forkpoint.errors import AlreadyExistsError, NotFoundError, PreconditionError
from forkpoint.ids import SessionName
from forkpoint.statestore.records import CheckpointRow, ManifestRow, RequestKey
from forkpoint.statestore.rowjson import checkpoint_from_value, checkpoint_to_value
from forkpoint.statestore.rules import check_checkpoint, check_epoch
from forkpoint.statestore.sqlite import log, requests, sessions
from forkpoint.statestore.sqlite.sessions import StoredSession
from forkpoint.statestore.sqlite.tx import Tx

_COLUMNS: Final = (
    "workflow, session, checkpoint, branch, position, grid_position, chain_hash, numerics_id, automatic, create_us"
)
_MANIFEST: Final = "numerics_id, grid_position, chain_hash, manifest, create_us"


def put(
    tx: Tx, row: CheckpointRow, manifest: bytes, epoch: int, request: RequestKey | None, replace: bool
) -> CheckpointRow:
    """Catalog.put_checkpoint."""
    answer = requests.find(tx, request, "put_checkpoint")
    if answer is not None:
        return checkpoint_from_value(answer)
    name = row.session
    stored = sessions.live(tx, name)
    check_epoch(name, epoch, stored.row.epoch)
    check_checkpoint(row, stored.row.head)
    if log.position_chain(tx, stored, row.grid_position).grid_hash != row.chain_hash:
        raise PreconditionError(f"{name}: the checkpoint's chain hash at {row.grid_position} is not the log's")
    if tx.one("SELECT 1 FROM checkpoints WHERE workflow = ? AND session = ? AND checkpoint = ?", *_key(row)):
        raise AlreadyExistsError(f"{name}/checkpoints/{row.checkpoint}")
    tx.run(
        f"INSERT OR {'REPLACE' if replace else 'IGNORE'} INTO manifests ({_MANIFEST}) VALUES (?, ?, ?, ?, ?)",
        row.numerics_id,
        row.grid_position,
        row.chain_hash,
        manifest,
        tx.now_us,
    )
    tx.run(
        f"INSERT INTO checkpoints ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        *_key(row),
        stored.branch,
        row.position,
        row.grid_position,
        row.chain_hash,
        row.numerics_id,
        int(row.automatic),
        tx.now_us,
    )
    saved, _ = get(tx, name, row.checkpoint)
    requests.store(tx, request, "put_checkpoint", checkpoint_to_value(saved))
    return saved


def list_own(tx: Tx, name: SessionName) -> list[CheckpointRow]:
    """Catalog.list_checkpoints."""
    stored = sessions.live(tx, name)
    rows = tx.rows(
        f"SELECT {_COLUMNS} FROM checkpoints WHERE workflow = ? AND session = ? AND grid_position <= ?"
        " ORDER BY position, create_us, checkpoint",
        name.workflow,
        name.session,
        stored.row.head,
    )
    return [_row(row) for row in rows if _on_chain(tx, stored, row)]


def _on_chain(tx: Tx, stored: StoredSession, row: tuple[Any, ...]) -> bool:
    branch, grid_position, chain_hash = int(row[3]), int(row[5]), bytes(row[6])
    if branch == stored.branch:
        return True
    return log.position_chain(tx, stored, grid_position).grid_hash == chain_hash


def get(tx: Tx, name: SessionName, checkpoint: str) -> tuple[CheckpointRow, bytes]:
    """Catalog.get_checkpoint."""
    sessions.live(tx, name)
    found = tx.one(
        f"SELECT {_COLUMNS} FROM checkpoints WHERE workflow = ? AND session = ? AND checkpoint = ?",
        name.workflow,
        name.session,
        checkpoint,
    )
    if found is None:
        raise NotFoundError(f"{name}/checkpoints/{checkpoint}")
    row = _row(found)
    manifest = tx.one(
        "SELECT manifest FROM manifests WHERE chain_hash = ? AND grid_position = ? AND numerics_id = ?",
        row.chain_hash,
        row.grid_position,
        row.numerics_id,
    )
    if manifest is None:
        raise NotFoundError(f"{name}/checkpoints/{checkpoint}", "has lost its manifest")
    return row, manifest[0]


def find_manifests(tx: Tx, points: Sequence[tuple[int, bytes]]) -> list[ManifestRow]:
    """Catalog.find_manifests."""
    found: list[ManifestRow] = []
    for position, chain_hash in points:
        sql = f"SELECT {_MANIFEST} FROM manifests WHERE chain_hash = ? AND grid_position = ? ORDER BY numerics_id"
        found.extend(ManifestRow(*row) for row in tx.rows(sql, chain_hash, position))
    return sorted(found, key=lambda row: -row.grid_position)


def list_manifests(tx: Tx) -> list[ManifestRow]:
    """Catalog.list_manifests."""
    sql = f"SELECT {_MANIFEST} FROM manifests ORDER BY grid_position DESC, chain_hash, numerics_id"
    return [ManifestRow(*row) for row in tx.rows(sql)]


def _key(row: CheckpointRow) -> tuple[str, str, str]:
    return row.session.workflow, row.session.session, row.checkpoint


def _row(row: tuple[Any, ...]) -> CheckpointRow:
    workflow, session, checkpoint, _branch, position, grid_position, chain_hash, numerics_id, automatic, create_us = row
    name = SessionName(workflow, session)
    return CheckpointRow(name, checkpoint, position, grid_position, chain_hash, numerics_id, bool(automatic), create_us)
