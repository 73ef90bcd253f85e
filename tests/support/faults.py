"""Faults for stores: wrappers over the two ports, a faulty VFS and faulty file operations."""

import errno
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import apsw

from forkpoint.errors import BlobMissingError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore, Buffer
from forkpoint.statestore.file.ops import SystemFileOps
from forkpoint.statestore.records import Durability

_NUMBERS = itertools.count()


class FaultyBlobs:
    """A blob store whose frames and answers can be spoilt.

    `errors` maps a method's name to an error that it raises before doing anything; `damage` changes frames as they
    are read; digests in `hidden` seem missing. `calls` counts calls by method.
    """

    def __init__(self, inner: BlobStore) -> None:
        self._inner = inner
        self.errors: dict[str, Exception] = {}
        self.damage: dict[str, Callable[[bytes], bytes]] = {}
        self.hidden: set[str] = set()
        self.calls: dict[str, int] = {}

    @property
    def broken(self) -> str | None:
        return self._inner.broken

    def _enter(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        if method in self.errors:
            raise self.errors[method]

    @property
    def durability(self) -> Durability:
        return self._inner.durability

    @property
    def survives_node(self) -> bool:
        return self._inner.survives_node

    async def open(self) -> None:
        await self._inner.open()

    async def put(self, digest: str, *pieces: Buffer) -> bool:
        self._enter("put")
        return await self._inner.put(digest, *pieces)

    async def get(self, digest: str) -> bytes:
        self._enter("get")
        if digest in self.hidden:
            raise BlobMissingError(digest)
        frame = await self._inner.get(digest)
        return self.damage[digest](frame) if digest in self.damage else frame

    async def has(self, digest: str) -> bool:
        self._enter("has")
        return digest not in self.hidden and await self._inner.has(digest)

    async def replace(self, digest: str, *pieces: Buffer) -> None:
        self._enter("replace")
        self.damage.pop(digest, None)
        self.hidden.discard(digest)
        await self._inner.replace(digest, *pieces)

    @property
    def tier(self) -> str:
        return self._inner.tier

    async def fence(self, term: int) -> None:
        self._enter("fence")
        await self._inner.fence(term)

    async def delete(self, digests: Sequence[str], term: int = 0) -> None:
        self._enter("delete")
        await self._inner.delete(digests, term)

    async def sizes(self, digests: Sequence[str]) -> list[int | None]:
        self._enter("sizes")
        return await self._inner.sizes(digests)

    async def digests(self) -> AsyncIterator[str]:
        self._enter("digests")
        async for digest in self._inner.digests():
            yield digest

    async def close(self) -> None:
        await self._inner.close()


class FaultyCatalog:
    """A catalog whose calls can fail before their effect, or after it (the answer is lost)."""

    def __init__(self, inner: Catalog) -> None:
        self._inner = inner
        self.before: dict[str, Exception] = {}
        self.after: dict[str, Exception] = {}
        self.calls: dict[str, int] = {}

    @classmethod
    def over(cls, inner: Catalog) -> "tuple[FaultyCatalog, Catalog]":
        """The wrapper twice: to spoil, and typed as the port."""
        faulty = cls(inner)
        return faulty, cast(Catalog, faulty)

    def __getattr__(self, method: str) -> Any:
        attribute = getattr(self._inner, method)
        if not callable(attribute):
            return attribute

        async def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[method] = self.calls.get(method, 0) + 1
            if method in self.before:
                raise self.before.pop(method)
            result = await attribute(*args, **kwargs)
            if method in self.after:
                raise self.after.pop(method)
            return result

        return call


class FaultyVFS(apsw.VFS):
    """SQLite's system VFS with a switch for each fault. Close all connections, then unregister()."""

    def __init__(self) -> None:
        self.vfs_name = f"faulty-{next(_NUMBERS)}"
        self.write_error: Exception | None = None
        self.sync_error: Exception | None = None
        self.syncs = 0
        super().__init__(self.vfs_name, "")

    def xOpen(self, name: "str | apsw.URIFilename | None", flags: list[int]) -> apsw.VFSFile:
        return _FaultyFile(self, name, flags)


class _FaultyFile(apsw.VFSFile):
    def __init__(self, vfs: FaultyVFS, name: "str | apsw.URIFilename | None", flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._vfs = vfs

    def excepthook(
        self, etype: type[BaseException] | None, evalue: BaseException | None, etraceback: TracebackType | None
    ) -> bool:
        """An error that a fault raised on purpose needs no report."""
        return True

    def xWrite(self, data: bytes, offset: int) -> None:
        if self._vfs.write_error is not None:
            raise self._vfs.write_error
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._vfs.syncs += 1
        if self._vfs.sync_error is not None:
            raise self._vfs.sync_error
        super().xSync(flags)


class FaultyOps(SystemFileOps):
    """File operations that fail with an errno while it is set; a failing write leaves half of its bytes."""

    def __init__(self) -> None:
        self.write_errno = 0
        self.rename_errno = 0
        self.sync_folder_errno = 0
        self.read_errno = 0

    def write_synced(self, path: Path, pieces: Sequence[Buffer]) -> None:
        if self.write_errno:
            data = b"".join(pieces)
            path.write_bytes(data[: len(data) // 2])
            raise OSError(self.write_errno, os.strerror(self.write_errno))
        super().write_synced(path, pieces)

    def rename(self, source: Path, target: Path) -> None:
        if self.rename_errno:
            raise OSError(self.rename_errno, os.strerror(self.rename_errno))
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        if self.sync_folder_errno:
            raise OSError(self.sync_folder_errno, os.strerror(self.sync_folder_errno))
        super().sync_folder(path)

    def read(self, path: Path) -> bytes:
        if self.read_errno:
            raise OSError(self.read_errno, os.strerror(self.read_errno))
        return super().read(path)


FULL = errno.ENOSPC
BROKEN = errno.EIO
