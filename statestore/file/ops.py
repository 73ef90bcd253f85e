"""The few file operations a durable blob needs, behind a port so that tests can record them and lose them."""

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from forkpoint.statestore.blobs import Buffer

IOV_MAX: Final = 1024
"""Buffers that one writev takes, on Linux."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size in bytes, and a mark that another file at the same path, put there later, does not have."""

    size: int
    mark: tuple[int, int]


class FileOps(Protocol):
    """Blocking file operations; each may raise OSError. A name is durable once its folder is synced."""

    def make_folder(self, path: Path) -> None:
        """Create a folder; fine when it is there. Its parent must exist."""
        ...

    def write_synced(self, path: Path, pieces: Sequence[Buffer]) -> None:
        """Create or overwrite a file with `pieces`, one after the other, and sync its content (not its name)."""
        ...

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; replaces the target."""
        ...

    def sync_folder(self, path: Path) -> None:
        """Make the folder's names durable."""
        ...

    def unlink(self, path: Path) -> None:
        """Remove a file; FileNotFoundError when there is none."""
        ...

    def read(self, path: Path) -> bytes:
        """The whole file; FileNotFoundError when there is none."""
        ...

    def exists(self, path: Path) -> bool:
        """Whether a file or folder is there."""
        ...

    def facts(self, path: Path) -> FileFacts | None:
        """What the system knows of a file; None when there is none."""
        ...

    def names(self, path: Path) -> list[str]:
        """Names in a folder, sorted; empty when there is none."""
        ...

    def lock(self, path: Path) -> int | None:
        """Take an flock on a file, made when missing, for as long as the descriptor lives. None: another holds it."""
        ...

    def unlock(self, descriptor: int) -> None:
        """Let a lock go."""
        ...


class SystemFileOps:
    """The operating system's."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(exist_ok=True, mode=0o700)

    def write_synced(self, path: Path, pieces: Sequence[Buffer]) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            left = [memoryview(piece) for piece in pieces if len(piece)]
            while left:
                written = os.writev(descriptor, left[:IOV_MAX])
                while left and written >= len(left[0]):
                    written -= len(left.pop(0))
                if written:
                    left[0] = left[0][written:]
            os.fdatasync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def sync_folder(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def unlink(self, path: Path) -> None:
        path.unlink()

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def exists(self, path: Path) -> bool:
        return path.exists()

    def facts(self, path: Path) -> FileFacts | None:
        try:
            found = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return FileFacts(found.st_size, (found.st_ino, found.st_ctime_ns))

    def names(self, path: Path) -> list[str]:
        try:
            return sorted(os.listdir(path))  # noqa: PTH208 - a path object for each of a million names costs more than all else
        except (FileNotFoundError, NotADirectoryError):
            return []

    def lock(self, path: Path) -> int | None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def unlock(self, descriptor: int) -> None:
        os.close(descriptor)


def make_folders(ops: FileOps, folder: Path) -> None:
    """Create a folder and whatever is missing above it, each made durable in its parent."""
    missing = [path for path in (folder, *folder.parents) if not ops.exists(path)]
    for path in reversed(missing):
        ops.make_folder(path)
        ops.sync_folder(path.parent)
