"""A blob store of one's own, all blobs in one file, and how the conformance suite runs on it.

    FORKPOINT_CONFORMANCE=blobs_in_one_file:backends PYTHONPATH=examples python -m pytest tests/conformance -k one-file

It takes Python's own sqlite3, for brevity: each call is a transaction. `python examples/blobs_in_one_file.py [FOLDER]`
stores a blob and reads it back.
"""

import asyncio
import contextlib
import secrets
import sqlite3
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from forkpoint.errors import BlobMissingError, StoreUnavailableError
from forkpoint.statestore.blobs import BlobStore, Buffer
from forkpoint.statestore.codec import decode, digest_of, encode_pieces
from forkpoint.statestore.errors import StaleCollectorError
from forkpoint.statestore.records import Durability

if TYPE_CHECKING:
    from tests.conformance.backends import Backend

T = TypeVar("T")

TABLES = """
PRAGMA synchronous = FULL;
CREATE TABLE IF NOT EXISTS blobs (digest TEXT PRIMARY KEY, frame BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS place (tier TEXT NOT NULL, term INTEGER NOT NULL);
"""


class OneFileBlobs:
    """See forkpoint.statestore.blobs.BlobStore."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._closed = False
        self._tier = ""

    broken = None
    durability = Durability.LOCAL_FSYNC
    survives_node = False

    @property
    def tier(self) -> str:
        return self._tier

    async def open(self) -> None:
        def work(db: sqlite3.Connection) -> str:
            db.execute("INSERT INTO place SELECT ?, 0 WHERE NOT EXISTS (SELECT 1 FROM place)", (secrets.token_hex(16),))
            return str(db.execute("SELECT tier FROM place").fetchone()[0])

        self._tier = await self._run(work)

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        frame = b"".join(pieces)
        sql = "INSERT OR IGNORE INTO blobs VALUES (?, ?)"
        return await self._run(lambda db: db.execute(sql, (digest, frame)).rowcount == 1)

    async def get(self, digest: str) -> bytes:
        found = await self._run(lambda db: db.execute("SELECT frame FROM blobs WHERE digest = ?", (digest,)).fetchone())
        if found is None:
            raise BlobMissingError(digest)
        return bytes(found[0])

    async def has(self, digest: str) -> bool:
        return (await self.sizes([digest]))[0] is not None

    async def replace(self, digest: str, *pieces: Buffer) -> None:
        frame = b"".join(pieces)
        await self._run(lambda db: db.execute("INSERT OR REPLACE INTO blobs VALUES (?, ?)", (digest, frame)))

    async def sizes(self, digests: Sequence[str]) -> list[int | None]:
        sql = "SELECT length(frame) FROM blobs WHERE digest = ?"

        def work(db: sqlite3.Connection) -> list[int | None]:
            found = [db.execute(sql, (digest,)).fetchone() for digest in digests]
            return [None if row is None else int(row[0]) for row in found]

        return await self._run(work)

    async def fence(self, term: int) -> None:
        def work(db: sqlite3.Connection) -> None:
            self._check(db, term)
            db.execute("UPDATE place SET term = ?", (term,))

        await self._run(work)

    async def delete(self, digests: Sequence[str], term: int = 0) -> None:
        def work(db: sqlite3.Connection) -> None:
            self._check(db, term)
            db.executemany("DELETE FROM blobs WHERE digest = ?", [(digest,) for digest in digests])

        await self._run(work)

    async def digests(self) -> AsyncIterator[str]:
        for row in await self._run(lambda db: db.execute("SELECT digest FROM blobs").fetchall()):
            yield str(row[0])

    async def close(self) -> None:
        self._closed = True

    def _check(self, db: sqlite3.Connection, term: int) -> None:
        current = int(db.execute("SELECT term FROM place").fetchone()[0])
        if term < current:
            raise StaleCollectorError(self._tier, term, current)

    async def _run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """One transaction, in a thread: a call that is cancelled happens wholly or not at all."""
        if self._closed:
            raise StoreUnavailableError(str(self._path), "it is closed")
        return await asyncio.to_thread(self._transact, work)

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            with contextlib.closing(sqlite3.connect(self._path, timeout=10, isolation_level=None)) as db:
                db.executescript(TABLES)
                db.execute("BEGIN IMMEDIATE")
                with db:
                    return work(db)
        except sqlite3.OperationalError as error:
            raise StoreUnavailableError(str(self._path), str(error)) from error


def backends() -> "list[Backend]":
    """What FORKPOINT_CONFORMANCE names: each opens in an empty folder, and the same store when it is called again."""
    from tests.conformance.backends import Backend

    return [Backend("one-file", blobs=lambda folder: OneFileBlobs(folder / "blobs.db"))]


async def main(folder: Path) -> None:
    """Store a blob as a checkpoint would, and read it back."""
    blobs: BlobStore = OneFileBlobs(folder / "blobs.db")
    await blobs.open()
    raw = bytes(100_000)
    await blobs.put(digest_of(raw), *encode_pieces(raw))
    frame = await blobs.get(digest_of(raw))
    print(f"{len(frame)} bytes hold {len(decode(digest_of(raw), frame))}, whole")
    await blobs.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(Path(sys.argv[1]).resolve()))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            asyncio.run(main(Path(temporary)))
