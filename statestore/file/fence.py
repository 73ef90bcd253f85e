"""Who may delete from a folder of blobs: the folder's own identity, and the highest term that a collector claimed.

`ROOT/tier` names the place, `ROOT/fence` holds the term, and whoever reads or raises it, and whoever deletes under it,
holds an flock on `ROOT/fence.lock` meanwhile. So a collector that was stopped in the middle of a delete still holds the
lock, and one that wakes up later finds a higher term.
"""

import contextlib
import re
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from forkpoint.errors import StoreUnavailableError
from forkpoint.statestore.errors import StaleCollectorError
from forkpoint.statestore.file.ops import FileOps

LOCK_TRIES: Final = 500
LOCK_WAIT_SECONDS: Final = 0.01
"""Five seconds in all: a batch of deletes lasts milliseconds."""
_TIER: Final = re.compile(r"[0-9a-f]{32}\n\Z")


class FileFence:
    """Blocking; for a folder that exists. `temporary` gives paths on the folder's file system to write at."""

    def __init__(self, root: Path, ops: FileOps, temporary: Callable[[str], Path]) -> None:
        self._root = root
        self._ops = ops
        self._temporary = temporary

    def tier(self) -> str:
        """The folder's identity, drawn by whoever opens it first. A copy of the folder is another place only once its
        `tier` file is removed."""
        path = self._root / "tier"
        if not self._ops.exists(path):
            with self._locked():
                if not self._ops.exists(path):
                    self._write(path, f"{secrets.token_hex(16)}\n")
        text = self._ops.read(path).decode(errors="replace")
        if not _TIER.match(text):
            raise StoreUnavailableError(str(path), f"it holds {text[:40]!r}, not the identity of a tier")
        return text.strip()

    def claim(self, tier: str, term: int) -> None:
        """BlobStore.fence."""
        with self._locked():
            current = self._current()
            if term < current:
                raise StaleCollectorError(tier, term, current)
            if term > current:
                self._write(self._root / "fence", f"{term}\n")

    @contextlib.contextmanager
    def held(self, tier: str, term: int) -> Iterator[None]:
        """Nobody else deletes or claims meanwhile. Raises StaleCollectorError."""
        with self._locked():
            current = self._current()
            if term < current:
                raise StaleCollectorError(tier, term, current)
            yield

    def _current(self) -> int:
        try:
            return int(self._ops.read(self._root / "fence"))
        except FileNotFoundError:
            return 0
        except ValueError as error:
            raise StoreUnavailableError(str(self._root / "fence"), "it holds no term") from error

    def _write(self, path: Path, text: str) -> None:
        temporary = self._temporary(path.name)
        self._ops.write_synced(temporary, (text.encode(),))
        self._ops.rename(temporary, path)
        self._ops.sync_folder(self._root)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        lock = self._root / "fence.lock"
        for _ in range(LOCK_TRIES):
            held = self._ops.lock(lock)
            if held is not None:
                break
            threading.Event().wait(LOCK_WAIT_SECONDS)
        else:
            raise StoreUnavailableError(str(lock), "another process collects here and does not get on")
        try:
            yield
        finally:
            self._ops.unlock(held)
