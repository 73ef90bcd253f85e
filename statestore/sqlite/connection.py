"""One SQLite connection, kept in one thread: open, transactions, and what each failure means.

All work of a process on a catalog goes through its single connection in its single worker thread, so that nothing
blocks the event loop and no transaction is ever open across an await. Other processes may share the file.
"""

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

import apsw

from forkpoint.errors import ConfigError, StoreFullError, StoreUnavailableError
from forkpoint.statestore.file.ops import SystemFileOps, make_folders

P = ParamSpec("P")
T = TypeVar("T")

BUSY_MS: Final = 10_000
"""How long a transaction waits for another process's; each lasts milliseconds, so this much is an outage."""
WAL_TRIES: Final = 100
WAL_WAIT_SECONDS: Final = 0.02
CHECKPOINT_PAGES: Final = 4000
"""WAL length at which its pages are moved into the database: 16 MB. Moving holds up the commits behind it for some ten
milliseconds, however often the same pages were written since; recovery reads 16 MB at most."""
CACHE_KIB: Final = 32 * 1024
"""Pages kept in memory: those that a step of a thousand sessions touches, and the upper levels of the tables."""
STATEMENTS_MAX: Final = 256
"""Prepared statements kept; the catalog has about a hundred."""
SYNCHRONOUS: Final = ("OFF", "NORMAL", "FULL", "EXTRA")


def check_sqlite_version(version: str) -> None:
    """Refuse a SQLite whose WAL reset may corrupt a file shared by processes. Raises ConfigError.

    Fixed in 3.51.3 and, on their branches, in 3.50.7 and 3.44.6 (sqlite.org/wal.html, section on the reset bug).
    """
    number = tuple(int(part) for part in version.split("."))[:3]
    fixed = number >= (3, 51, 3) or (3, 50, 7) <= number < (3, 51) or (3, 44, 6) <= number < (3, 45)
    if not fixed:
        raise ConfigError("sqlite", "the apsw package", f"SQLite {version} can corrupt a shared WAL; 3.51.3 is needed")


def _enter_wal(db: apsw.Connection) -> str:
    """Switch to WAL; returns the journal mode. When two connections switch a new file at the same time SQLite refuses
    one of them at once, whatever its busy timeout: the other is done in a moment, and then the file is in WAL mode."""
    for _ in range(WAL_TRIES):
        with contextlib.suppress(apsw.BusyError):
            return str(db.pragma("journal_mode", "wal"))
        threading.Event().wait(WAL_WAIT_SECONDS)
    return str(db.pragma("journal_mode", "wal"))


class SqliteConnection:
    """The connection of one catalog. `run` is called from the event loop; everything else runs in the worker."""

    def __init__(self, path: Path, vfs: str | None = None, synchronous: str = "FULL") -> None:
        if synchronous not in SYNCHRONOUS:
            raise ValueError(f"synchronous is one of {SYNCHRONOUS}, got {synchronous!r}")
        self.path = path
        self._vfs = vfs
        self._synchronous = synchronous
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forkpoint-sqlite")
        self._db: apsw.Connection | None = None
        self._broken: str | None = None
        self._wal_pages = 0
        self._closed = False
        self.undone = 0
        """Counts transactions and savepoints that were rolled back: what anyone remembers of them is void."""

    # --- from the event loop -----------------------------------------------------------------------------------
    @property
    def broken(self) -> str | None:
        """Catalog.broken."""
        return self._broken

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in the worker thread. Cancelling does not undo it."""
        return await asyncio.wrap_future(self.submit(lambda: work(*args, **kwargs)))

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Let the worker thread run `work` after what it was given before."""
        if self._closed:
            raise StoreUnavailableError(str(self.path), "it is closed")
        return self._thread.submit(work)

    async def close(self) -> None:
        """Close the connection and end the thread. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    # --- in the worker -----------------------------------------------------------------------------------------
    def connect(self) -> None:
        """Open the file. Raises ConfigError for an unfit SQLite, StoreUnavailableError."""
        check_sqlite_version(apsw.sqlite_lib_version())
        try:
            make_folders(SystemFileOps(), self.path.parent)
            self._make_private()
        except OSError as error:
            raise StoreUnavailableError(str(self.path), str(error)) from error
        with self._failures():
            db = apsw.Connection(str(self.path), vfs=self._vfs, statementcachesize=STATEMENTS_MAX)
            self._db = db
            db.set_busy_timeout(BUSY_MS)
            db.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            db.pragma("synchronous", self._synchronous)
            db.pragma("cache_size", -CACHE_KIB)
            if _enter_wal(db) != "wal":
                raise StoreUnavailableError(str(self.path), "the file system can't hold a shared WAL")
            db.pragma("wal_autocheckpoint", 0)
            db.pragma("foreign_keys", "ON")
            db.set_wal_hook(self._note_wal)

    def _make_private(self) -> None:
        """A new file is its owner's alone: it holds what users wrote. Never opens a file that exists: closing any
        descriptor of it would drop the locks that SQLite holds on it in this process."""
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))

    @property
    def db(self) -> apsw.Connection:
        """The open connection. Raises StoreUnavailableError when the store failed or is not open."""
        if self._broken is not None:
            raise StoreUnavailableError(str(self.path), f"{self._broken}; open it again")
        if self._db is None:
            raise StoreUnavailableError(str(self.path), "it is not open")
        return self._db

    @contextmanager
    def transaction(self, begin: str) -> Iterator[apsw.Connection]:
        """A transaction: committed at the end, rolled back on any error. `begin`: BEGIN or BEGIN IMMEDIATE."""
        db = self.db
        with self._failures():
            db.execute(begin)
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                self.undone += 1
                raise
            finally:
                if db.in_transaction:
                    db.execute("ROLLBACK")

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """SQLite's errors in our words. After an I/O error (a failed fsync above all) the store is served no more:
        the kernel may have dropped the pages, so that a second fsync would succeed without them."""
        try:
            yield
        except apsw.FullError as error:
            raise StoreFullError(str(self.path), str(error)) from error
        except (apsw.IOError, apsw.CorruptError, apsw.NotADBError) as error:
            self._broken = f"{type(error).__name__}: {error}"
            raise StoreUnavailableError(str(self.path), self._broken) from error
        except apsw.ConstraintError:
            raise
        except apsw.Error as error:
            raise StoreUnavailableError(str(self.path), f"{type(error).__name__}: {error}") from error

    def _note_wal(self, _db: apsw.Connection, _name: str, pages: int) -> int:
        self._wal_pages = pages
        return apsw.SQLITE_OK

    def move_wal_when_long(self) -> None:
        """Move WAL pages into the database if there are many."""
        if self._wal_pages >= CHECKPOINT_PAGES:
            self._wal_pages = 0
            self._move_wal()

    def _move_wal(self) -> None:
        """Move WAL pages into the database, when no other process is doing it. Best effort: the next commit retries,
        and a failure of the disk shows in the next transaction."""
        if self._db is None or self._broken is not None:
            return
        lock = os.open(f"{self.path}-checkpoint", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with self._failures():
                self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_PASSIVE)
        except (BlockingIOError, StoreUnavailableError, StoreFullError):
            return
        finally:
            os.close(lock)

    def _close(self) -> None:
        self._move_wal()
        if self._db is not None:
            self._db.close()
            self._db = None
