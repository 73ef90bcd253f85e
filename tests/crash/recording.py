"""Recorders: an apsw VFS for SQLite's files, and FileOps for blobs. Both write through and note every operation."""

import itertools
import threading
from collections.abc import Sequence
from pathlib import Path

import apsw

from forkpoint.statestore.blobs import Buffer
from forkpoint.statestore.file.ops import SystemFileOps
from tests.crash.disk import Operation

_VFS_NUMBERS = itertools.count()
_JOURNALS = apsw.SQLITE_OPEN_MAIN_JOURNAL | apsw.SQLITE_OPEN_WAL


class Recording:
    """Operations of all recorders, in the order in which they happened."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._lock = threading.Lock()
        self._files: dict[str, int] = {}
        self._next_file = 0

    def note(self, operation: Operation) -> None:
        with self._lock:
            self.operations.append(operation)

    def file_at(self, path: str) -> int:
        """The number of the file at a path; a new one is linked there when there is none."""
        with self._lock:
            if path not in self._files:
                self._files[path] = self._next_file
                self._next_file += 1
                folder = str(Path(path).parent)
                self.operations.append(Operation("link", folder, name=path, file=self._files[path]))
            return self._files[path]

    def number_of(self, path: str) -> int:
        """The number of the file that is at a path now."""
        return self._files[path]

    def unlink(self, path: str) -> None:
        with self._lock:
            self._files.pop(path, None)
            self.operations.append(Operation("unlink", str(Path(path).parent), name=path))

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            file = self._files.pop(source)
            self._files[target] = file
            folder = str(Path(target).parent)
            self.operations.append(Operation("rename", folder, name=target, source=source, file=file))


class RecordingVFS(apsw.VFS):
    """The system's VFS, noted. shm stays with the system: it does not survive a crash and is rebuilt from the WAL."""

    def __init__(self, recording: Recording) -> None:
        self.vfs_name = f"recording-{next(_VFS_NUMBERS)}"
        self.recording = recording
        super().__init__(self.vfs_name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return RecordingFile(self.recording, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:
        super().xDelete(filename, syncdir)
        self.recording.unlink(filename)
        if syncdir:
            self.recording.note(Operation("sync_folder", str(Path(filename).parent)))


class RecordingFile(apsw.VFSFile):
    """One file of SQLite, noted."""

    def __init__(self, recording: Recording, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._recording = recording
        self._path = name.filename() if isinstance(name, apsw.URIFilename) else str(name)
        self._file = recording.file_at(self._path)
        self._syncs_folder = bool(flags[0] & apsw.SQLITE_OPEN_CREATE and flags[0] & _JOURNALS)
        """SQLite syncs the folder with the first sync of a journal or WAL, unseen by a VFS."""

    def xWrite(self, data: bytes, offset: int) -> None:
        super().xWrite(data, offset)
        self._recording.note(Operation("write", self._file, offset, bytes(data), file=self._file))

    def xTruncate(self, newsize: int) -> None:
        super().xTruncate(newsize)
        self._recording.note(Operation("truncate", self._file, newsize, file=self._file))

    def xSync(self, flags: int) -> None:
        super().xSync(flags)
        self._recording.note(Operation("sync", self._file, file=self._file))
        if self._syncs_folder:
            self._syncs_folder = False
            self._recording.note(Operation("sync_folder", str(Path(self._path).parent)))


class RecordingOps(SystemFileOps):
    """Blob files, noted. Folders count as names too: a blob whose folder was never synced is gone."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording

    def make_folder(self, path: Path) -> None:
        super().make_folder(path)
        self._recording.file_at(str(path))

    def write_synced(self, path: Path, pieces: Sequence[Buffer]) -> None:
        super().write_synced(path, pieces)
        data = b"".join(pieces)
        file = self._recording.file_at(str(path))
        half = len(data) // 2
        self._recording.note(Operation("write", file, 0, data[:half], file=file))
        self._recording.note(Operation("write", file, half, data[half:], file=file))
        self._recording.note(Operation("sync", file, file=file))

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        self._recording.rename(str(source), str(target))

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self._recording.note(Operation("sync_folder", str(path)))

    def unlink(self, path: Path) -> None:
        super().unlink(path)
        self._recording.unlink(str(path))


class OpsWithoutFolderSync(RecordingOps):
    """A mistake to be found: names of blobs are never synced."""

    def sync_folder(self, path: Path) -> None:
        pass


class OpsWithoutContentSync(RecordingOps):
    """A mistake to be found: contents of blobs are never synced."""

    def write_synced(self, path: Path, pieces: Sequence[Buffer]) -> None:
        SystemFileOps.write_synced(self, path, pieces)
        data = b"".join(pieces)
        file = self._recording.file_at(str(path))
        self._recording.note(Operation("write", file, 0, data, file=file))
