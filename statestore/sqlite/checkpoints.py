"""Checkpoints of sessions, and the manifests they name."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from forkpoint.errors import AlreadyExistsError, NotFoundError, PreconditionError
from forkpoint.ids import SessionName
from forkpoint.statestore.records import CheckpointRow, ManifestRow, RequestKey
from forkpoint.statestore.rowjson import checkpoint_from_value, checkpoint_to_value
from forkpoint.statestore.rules import check_checkpoint, check_epoch
from forkpoint.statestore.sqlite import collection, log, requests, sessions
from forkpoint.statestore.sqlite.sessions import StoredSession
from forkpoint.statestore.sqlite.tx import Tx

COLUMNS: Final = (
    "workflow, session, checkpoint, branch, position, grid_position, chain_hash, numerics_id, automatic, create_us,"
    " expire_us"
)
_MANIFEST: Final = "numerics_id, grid_position, chain_hash, manifest, create_us"


def put(
    tx: Tx,
    row: CheckpointRow,
    manifest: bytes,
    epoch: int,
    request: RequestKey | None,
    replace_manifest: bool,
    digests: Sequence[str],
    since: int,
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
    collection.check_digests(tx, digests, since)
    tx.run(
        f"INSERT OR {'REPLACE' if replace_manifest else 'IGNORE'} INTO manifests ({_MANIFEST}) VALUES (?, ?, ?, ?, ?)",
        row.numerics_id,
        row.grid_position,
        row.chain_hash,
        manifest,
        tx.now_us,
    )
    tx.run(
        f"INSERT INTO checkpoints ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        *_key(row),
        stored.branch,
        row.position,
        row.grid_position,
        row.chain_hash,
        row.numerics_id,
        int(row.automatic),
        tx.now_us,
        row.expire_us,
    )
    saved = replace(row, create_us=tx.now_us)
    requests.store(tx, request, "put_checkpoint", checkpoint_to_value(saved))
    return saved


def list_own(tx: Tx, name: SessionName) -> list[CheckpointRow]:
    """Catalog.list_checkpoints."""
    stored = sessions.live(tx, name)
    rows = tx.rows(
        f"SELECT {COLUMNS} FROM checkpoints WHERE workflow = ? AND session = ? AND grid_position <= ?"
        " ORDER BY position, create_us, checkpoint",
        name.workflow,
        name.session,
        stored.row.head,
    )
    return [row_of(row) for row in rows if on_chain(tx, stored, row)]


def on_chain(tx: Tx, stored: StoredSession, row: tuple[Any, ...]) -> bool:
    """Whether a row of `checkpoints`, at or below the head, lies on the session's chain."""
    branch, grid_position, chain_hash = int(row[3]), int(row[5]), bytes(row[6])
    if branch == stored.branch:
        return True
    return log.position_chain(tx, stored, grid_position).grid_hash == chain_hash


def get(tx: Tx, name: SessionName, checkpoint: str) -> tuple[CheckpointRow, bytes]:
    """Catalog.get_checkpoint."""
    row = _find(tx, name, checkpoint)
    manifest = tx.one(
        "SELECT manifest FROM manifests WHERE chain_hash = ? AND grid_position = ? AND numerics_id = ?",
        row.chain_hash,
        row.grid_position,
        row.numerics_id,
    )
    if manifest is None:
        raise NotFoundError(f"{name}/checkpoints/{checkpoint}", "has lost its manifest")
    return row, manifest[0]


def delete(tx: Tx, name: SessionName, checkpoint: str, request: RequestKey | None) -> CheckpointRow:
    """Catalog.delete_checkpoint."""
    answer = requests.find(tx, request, "delete_checkpoint")
    if answer is not None:
        return checkpoint_from_value(answer)
    row = _find(tx, name, checkpoint)
    tx.run("DELETE FROM checkpoints WHERE workflow = ? AND session = ? AND checkpoint = ?", *_key(row))
    requests.store(tx, request, "delete_checkpoint", checkpoint_to_value(row))
    return row


def _find(tx: Tx, name: SessionName, checkpoint: str) -> CheckpointRow:
    sessions.live(tx, name)
    found = tx.one(
        f"SELECT {COLUMNS} FROM checkpoints WHERE workflow = ? AND session = ? AND checkpoint = ?",
        name.workflow,
        name.session,
        checkpoint,
    )
    if found is None:
        raise NotFoundError(f"{name}/checkpoints/{checkpoint}")
    return row_of(found)


def find_manifests(tx: Tx, points: Sequence[tuple[int, bytes]]) -> list[ManifestRow]:
    """Catalog.find_manifests."""
    found: list[ManifestRow] = []
    for position, chain_hash in points:
        sql = f"SELECT {_MANIFEST} FROM manifests WHERE chain_hash = ? AND grid_position = ? ORDER BY numerics_id"
        found.extend(ManifestRow(*row) for row in tx.rows(sql, chain_hash, position))
    return sorted(found, key=lambda row: -row.grid_position)


def _key(row: CheckpointRow) -> tuple[str, str, str]:
    return row.session.workflow, row.session.session, row.checkpoint


def row_of(row: tuple[Any, ...]) -> CheckpointRow:
    """A row of `checkpoints` (COLUMNS) as a value."""
    workflow, session, checkpoint, _branch, position, grid_position, chain_hash, numerics_id, automatic, *times = row
    name = SessionName(workflow, session)
    return CheckpointRow(name, checkpoint, position, grid_position, chain_hash, numerics_id, bool(automatic), *times)
