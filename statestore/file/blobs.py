"""FileBlobs: one file a blob, `blobs/ab/abcd...`, written so that a name is never there without its content.

A put writes a temporary, syncs its content, renames it and syncs the folder. Temporaries lie in `tmp/` under the
name of a lock file that the writing process holds, so that whoever opens the store next can sweep those of the dead
and leave those of the living.
"""

import contextlib
import errno
import itertools
import secrets
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from forkpoint.errors import BlobMissingError, StoreFullError, StoreUnavailableError
from forkpoint.statestore.blobs import Buffer
from forkpoint.statestore.file.fence import FileFence
from forkpoint.statestore.file.groupsync import GroupSync
from forkpoint.statestore.file.ops import FileFacts, FileOps, SystemFileOps, make_folders
from forkpoint.statestore.file.selfcheck import DIGEST, strange_files
from forkpoint.statestore.findings import Finding
from forkpoint.statestore.records import Durability
from forkpoint.statestore.threads import run_in

P = ParamSpec("P")
T = TypeVar("T")

IO_MAX: Final = 32
"""Operations at once, each in a thread of the store's own: file systems write one journal entry for syncs that meet.
Measured on ext4 with parts of 244 kB: 32 reach nine tenths of the disk's sequential rate, 8 three quarters."""
DURABLE_NAMES_MAX: Final = 65_536
"""Names known to be synced: 64 checkpoints of a thousand parts, about 10 MB."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_PASSING: Final = (*_FULL, errno.EROFS, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ENFILE, errno.ENOENT)
"""Why a temporary could not be written, without anything that was written being in doubt: it works again once the
cause is gone."""


class FileBlobs:
    """See forkpoint.statestore.blobs.BlobStore. After a failed sync the store is served no more until it is made
    again: the kernel may have dropped what it could not write, and a second sync would hide that.

    `survives_node`: the folder lies on a file system that other machines mount too.
    """

    def __init__(self, root: Path, ops: FileOps | None = None, survives_node: bool = False) -> None:
        self._root = root
        self._ops = ops or SystemFileOps()
        self._survives_node = survives_node
        self._threads = ThreadPoolExecutor(IO_MAX, "forkpoint-blobs")
        self._closed = False
        self._broken: str | None = None
        self._durable_folders: set[Path] = set()
        self._new_folders = GroupSync(lambda: self._sync(root / "blobs"))
        self._durable: dict[str, tuple[int, int]] = {}
        self._noting = threading.Lock()
        self._token = ""
        self._numbers = itertools.count(1)
        self._lock: int | None = None
        self._fence = FileFence(root, self._ops, self._temporary)
        self._tier = ""
        self._guard(self._prepare)

    # --- the port ----------------------------------------------------------------------------------------------
    @property
    def broken(self) -> str | None:
        return self._broken

    @property
    def durability(self) -> Durability:
        return Durability.LOCAL_FSYNC

    @property
    def survives_node(self) -> bool:
        return self._survives_node

    async def open(self) -> None:
        await self._run(lambda: None)

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        return await self._run(self._put, self._path(digest), pieces, False)

    async def get(self, digest: str) -> bytes:
        return await self._ask(self._read, self._path(digest))

    async def has(self, digest: str) -> bool:
        return await self._run(self._has, self._path(digest))

    async def replace(self, digest: str, *pieces: Buffer) -> None:
        await self._run(self._put, self._path(digest), pieces, True)

    @property
    def tier(self) -> str:
        return self._tier

    async def fence(self, term: int) -> None:
        await self._run(self._fence.claim, self._tier, term)

    async def delete(self, digests: Sequence[str], term: int = 0) -> None:
        await self._run(self._delete, [self._path(digest) for digest in digests], term)

    async def sizes(self, digests: Sequence[str]) -> list[int | None]:
        return await self._ask(self._sizes, [self._path(digest) for digest in digests])

    async def digests(self) -> AsyncIterator[str]:
        await self._ask(self._check_home)
        for first in await self._ask(self._ops.names, self._root / "blobs"):
            for name in await self._ask(self._digests_below, first):
                yield name

    async def self_check(self) -> list[Finding]:
        """Whatever lies among the blobs and is none."""
        return await self._ask(lambda: list(strange_files(self._ops, self._root)))

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown(wait=False)
        if self._lock is not None:
            with contextlib.suppress(OSError):
                self._ops.unlink(self._root / "tmp" / f"{self._token}.lock")
            self._ops.unlock(self._lock)
            self._lock = None

    # --- how ---------------------------------------------------------------------------------------------------
    async def _run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, which may read memory of the caller's, in a thread."""
        self._check_open()
        return await run_in(self._threads, lambda: self._guard(work, *args, **kwargs))

    async def _ask(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, which reads none of it: a caller who is cancelled does not wait for a disk that hangs."""
        self._check_open()
        return await run_in(self._threads, lambda: self._guard(work, *args, **kwargs), lent=False)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreUnavailableError(str(self._root), "it is closed")

    def _guard(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work`, with the disk's failures in our words."""
        if self._broken is not None:
            raise StoreUnavailableError(str(self._root), f"{self._broken}; open it again")
        try:
            return work(*args, **kwargs)
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFullError(str(self._root), str(error)) from error
            raise StoreUnavailableError(str(self._root), str(error)) from error

    def _path(self, digest: str) -> Path:
        if not DIGEST.match(digest):
            raise ValueError(f"{digest!r} is no BLAKE3 digest")
        return self._root / "blobs" / digest[:2] / digest

    def _prepare(self) -> None:
        """Make the folders, take this process's lock, sweep temporaries of processes that died."""
        make_folders(self._ops, self._root)
        for folder in (self._root / "blobs", self._root / "tmp"):
            self._ops.make_folder(folder)
        self._sync(self._root)
        self._take_lock()
        names = self._ops.names(self._root / "tmp")
        for owner in sorted({name.partition(".")[0] for name in names} - {self._token}):
            held = self._ops.lock(self._root / "tmp" / f"{owner}.lock")
            if held is None:
                continue
            for name in (*[name for name in names if name.startswith(f"{owner}.")], f"{owner}.lock"):
                with contextlib.suppress(FileNotFoundError):
                    self._ops.unlink(self._root / "tmp" / name)
            self._ops.unlock(held)
        self._tier = self._fence.tier()

    def _temporary(self, name: str) -> Path:
        """Where to write what is renamed to `name` later."""
        return self._root / "tmp" / f"{self._token}.{next(self._numbers)}-{name[:8]}"

    def _take_lock(self) -> None:
        """Hold a lock file of our own; another one when a sweeper was quicker than our flock."""
        while self._lock is None:
            self._token = secrets.token_hex(8)
            path = self._root / "tmp" / f"{self._token}.lock"
            self._lock = self._ops.lock(path)
            if self._lock is not None and not self._ops.exists(path):
                self._ops.unlock(self._lock)
                self._lock = None

    def _read(self, path: Path) -> bytes:
        try:
            return self._ops.read(path)
        except FileNotFoundError as error:
            self._check_home()
            raise BlobMissingError(path.name) from error

    def _check_home(self) -> None:
        """Nothing is missing from a store that is not there: its disk may come back."""
        if not self._ops.exists(self._root / "blobs"):
            raise FileNotFoundError(errno.ENOENT, "the store's folder is gone", str(self._root))

    def _put(self, path: Path, pieces: tuple[Buffer, ...], overwrite: bool) -> bool:
        if not overwrite and self._has(path):
            return False
        temporary = self._temporary(path.name)
        try:
            self._make_durable_folder(path.parent)
            self._write(temporary, pieces)
            self._ops.rename(temporary, path)
        except OSError as error:
            if error.errno == errno.ENOENT:
                self._forget()
            with contextlib.suppress(OSError):
                self._ops.unlink(temporary)
            raise
        facts = self._ops.facts(path)
        self._sync(path.parent)
        self._remember(path.name, facts)
        return True

    def _forget(self) -> None:
        """A folder that was known to be there is gone: believe nothing."""
        with self._noting:
            self._durable_folders.clear()
            self._durable.clear()

    def _write(self, temporary: Path, pieces: tuple[Buffer, ...]) -> None:
        try:
            self._ops.write_synced(temporary, pieces)
        except OSError as error:
            if error.errno not in _PASSING:
                self._broken = f"writing {temporary.name} failed: {error}"
            raise

    def _has(self, path: Path) -> bool:
        """True only when the name is durable: another process may have renamed and not yet synced the folder. Also a
        name that was known to be: it may have been collected since, and put again."""
        facts = self._ops.facts(path)
        if facts is None:
            with self._noting:
                self._durable.pop(path.name, None)
            self._check_home()
            return False
        if self._durable.get(path.name) != facts.mark:
            self._make_durable_folder(path.parent)
            self._sync(path.parent)
            self._remember(path.name, facts)
        return True

    def _remember(self, digest: str, facts: FileFacts | None) -> None:
        """Note that a name is durable, so that finding it again costs no sync; forget the oldest of many."""
        with self._noting:
            if facts is not None:
                self._durable[digest] = facts.mark
            while len(self._durable) > DURABLE_NAMES_MAX:
                self._durable.pop(next(iter(self._durable)), None)

    def _make_durable_folder(self, folder: Path) -> None:
        """The folder exists and will survive a crash. One that is already there may be one that another process made
        and has not synced, so the first use in this process syncs too."""
        if folder in self._durable_folders:
            return
        self._ops.make_folder(folder)
        self._new_folders.wait()
        self._durable_folders.add(folder)

    def _delete(self, paths: list[Path], term: int) -> None:
        """Each folder is synced once, behind the last of its names."""
        self._check_home()
        with self._fence.held(self._tier, term):
            for path in paths:
                with self._noting:
                    self._durable.pop(path.name, None)
                with contextlib.suppress(FileNotFoundError):
                    self._ops.unlink(path)
            for folder in sorted({path.parent for path in paths}):
                if self._ops.exists(folder):
                    self._sync(folder)

    def _digests_below(self, first: str) -> list[str]:
        """Of one folder in 256."""
        names = self._ops.names(self._root / "blobs" / first)
        return [name for name in names if DIGEST.match(name) and name.startswith(first)]

    def _sizes(self, paths: list[Path]) -> list[int | None]:
        self._check_home()
        found = (self._ops.facts(path) for path in paths)
        return [None if facts is None else facts.size for facts in found]

    def _sync(self, folder: Path) -> None:
        try:
            self._ops.sync_folder(folder)
        except OSError as error:
            self._broken = f"syncing {folder} failed: {error}"
            raise
