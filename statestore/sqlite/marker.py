"""The store's marker in the `meta` table, and the creation of all tables with it."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import apsw

from forkpoint.errors import StateIncompatibleError
from forkpoint.statestore.records import SCHEMA_VERSION, StoreMarker
from forkpoint.statestore.sqlite.schema import SCHEMA, UPGRADES

_APPLICATION: Final = b"forkpoint"


def read_or_create(db: apsw.Connection, ours: StoreMarker) -> StoreMarker:
    """The file's marker; an empty file becomes a store with ours, one of an older version is brought up to this one,
    unless it is another model's. Raises StateIncompatibleError for other files."""
    tables = {str(row[0]) for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    if ours.schema_version != SCHEMA_VERSION:
        raise StateIncompatibleError("schema version", str(SCHEMA_VERSION), str(ours.schema_version))
    if not tables:
        db.execute(SCHEMA)
        values: dict[str, bytes] = {
            "application": _APPLICATION,
            "schema_version": str(ours.schema_version).encode(),
            "namespace": ours.namespace.encode(),
            "model_digest": ours.model_digest,
            "tokenizer_digest": ours.tokenizer_digest,
        }
        db.executemany("INSERT INTO meta (key, value) VALUES (?, ?)", list(values.items()))
        return ours
    if "meta" not in tables:
        raise StateIncompatibleError("store", "another application's tables", "forkpoint's")
    stored = _read(db)
    upgrade = UPGRADES.get(stored.schema_version)
    if upgrade is None:
        return stored
    current = replace(stored, schema_version=SCHEMA_VERSION)
    if current == ours:
        db.execute(upgrade)
        db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (str(SCHEMA_VERSION).encode(),))
    return current


def _read(db: apsw.Connection) -> StoreMarker:
    meta = {str(key): bytes(value) for key, value in db.execute("SELECT key, value FROM meta")}
    if meta.get("application") != _APPLICATION:
        raise StateIncompatibleError("store", "another application's tables", "forkpoint's")
    return StoreMarker(
        int(meta["schema_version"]), meta["namespace"].decode(), meta["model_digest"], meta["tokenizer_digest"]
    )


def read_marker(path: Path) -> StoreMarker | None:
    """The marker of the store in a file, None when there is no store yet. For tools that open what they find."""
    if not path.exists() or path.stat().st_size == 0:
        return None
    db = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        return _read(db)
    except apsw.SQLError:
        return None
    finally:
        db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
        db.close()
