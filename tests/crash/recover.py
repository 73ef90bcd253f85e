"""Recovery: put a crashed disk on a real (memory-backed) folder, open it, and compare with what was acknowledged."""

from dataclasses import dataclass
from pathlib import Path

import apsw
from blake3 import blake3

from forkpoint.errors import BlobError
from forkpoint.statestore.codec import decode
from forkpoint.statestore.manifest import unseal
from tests.crash.disk import Crash


def connect(path: Path) -> apsw.Connection:
    """A connection that recovers the WAL and leaves the database as it is."""
    db = apsw.Connection(str(path))
    db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    return db


def logical_digest(db: apsw.Connection) -> bytes:
    """A digest of every row of every table: two databases are equal when theirs are."""
    summary = blake3()
    tables = [row[0] for row in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table' ORDER BY name")]
    for table in tables:
        summary.update(repr((table, list(db.execute(f"SELECT * FROM {table}")))).encode())
    return summary.digest()


def manifests(db: apsw.Connection) -> list[bytes]:
    """All manifests in the database."""
    return [row[0] for row in db.execute("SELECT manifest FROM manifests")]


@dataclass(frozen=True)
class Snapshot:
    """The store after an acknowledged action: its rows, and the blobs that its manifests name."""

    digest: bytes
    blobs: frozenset[str]


def snapshot(database: Path) -> Snapshot:
    """The live store's rows now."""
    db = connect(database)
    try:
        named = {part.digest for manifest in manifests(db) for part in unseal(manifest).parts}
        return Snapshot(logical_digest(db), frozenset(named))
    finally:
        db.close()


class Recoverer:
    """Recovers crashes of one recording. `root` is where the recorded store lay, `scratch` where it is rebuilt."""

    def __init__(self, root: Path, scratch: Path, snapshots: list[Snapshot]) -> None:
        self._root = root
        self._scratch = scratch
        self._snapshots = snapshots
        self._present: dict[str, bytes] = {}
        self._recovered: dict[frozenset[tuple[str, bytes]], bytes] = {}
        self._whole_blobs: set[tuple[str, bytes]] = set()
        self.recoveries = 0

    def problem(self, crash: Crash) -> str | None:
        """What acknowledged thing is missing or wrong after this crash; None when all is well."""
        self.recoveries += 1
        files = crash.state.files()
        try:
            digest = self._recovered_digest(files)
        except apsw.Error as error:
            return f"{crash.story} at {crash.point}: {error}"
        allowed = self._snapshots[crash.acked : crash.acked + 2]
        found = next((snapshot for snapshot in allowed if snapshot.digest == digest), None)
        if found is None:
            older = next((n for n, known in enumerate(self._snapshots) if known.digest == digest), None)
            return (
                f"{crash.story} at {crash.point}: the store is as after action {older}, {crash.acked} were acknowledged"
            )
        for blob in found.blobs:
            if not self._blob_is_whole(files, blob):
                return f"{crash.story} at {crash.point}: blob {blob[:8]} of a committed manifest is missing or torn"
        return None

    def _recovered_digest(self, files: dict[str, bytes]) -> bytes:
        """Recover SQLite's files; the same files (a crash among the blobs) are recovered once."""
        prefix = f"{self._root}/"
        wanted = {path[len(prefix) :]: data for path, data in files.items() if path.startswith(f"{prefix}catalog.db")}
        key = frozenset((file, blake3(data).digest()) for file, data in wanted.items())
        if key not in self._recovered:
            self._materialise(wanted)
            db = connect(self._scratch / "catalog.db")
            try:
                self._recovered[key] = logical_digest(db)
            finally:
                db.close()
        return self._recovered[key]

    def _materialise(self, wanted: dict[str, bytes]) -> None:
        """Write SQLite's files; those that are the same as last time stay."""
        for file in self._present.keys() - wanted.keys():
            (self._scratch / file).unlink(missing_ok=True)
        for file, data in wanted.items():
            if self._present.get(file) != data:
                (self._scratch / file).write_bytes(data)
        (self._scratch / "catalog.db-shm").unlink(missing_ok=True)
        self._present = wanted

    def _blob_is_whole(self, files: dict[str, bytes], digest: str) -> bool:
        folder = self._root / "blobs" / "blobs" / digest[:2]
        frame = files.get(str(folder / digest))
        if frame is None or str(folder) not in files:
            return False
        if (digest, frame) in self._whole_blobs:
            return True
        try:
            decode(digest, frame)
        except BlobError:
            return False
        self._whole_blobs.add((digest, frame))
        return True
