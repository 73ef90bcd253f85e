"""What the file operations sync, as the operating system is asked for it: the recorders take their word for it."""

import os
import stat
from pathlib import Path

import pytest

from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.file.ops import SystemFileOps

DIGEST = "ab" * 32


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """(call, kind of file) of every sync, in order."""
    calls: list[tuple[str, str]] = []

    def noting(name: str) -> None:
        real = getattr(os, name)

        def call(descriptor: int) -> None:
            kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
            calls.append((name, kind))
            real(descriptor)

        monkeypatch.setattr(os, name, call)

    noting("fsync")
    noting("fdatasync")
    return calls


def test_content_is_synced_before_the_call_returns(tmp_path: Path, synced: list[tuple[str, str]]) -> None:
    SystemFileOps().write_synced(tmp_path / "blob", (b"in ", b"pieces"))
    assert (tmp_path / "blob").read_bytes() == b"in pieces"
    assert synced == [("fdatasync", "file")]


def test_names_are_synced_by_their_folder(tmp_path: Path, synced: list[tuple[str, str]]) -> None:
    SystemFileOps().sync_folder(tmp_path)
    assert synced == [("fsync", "folder")]


async def test_a_blob_syncs_its_content_then_its_name(tmp_path: Path, synced: list[tuple[str, str]]) -> None:
    blobs = FileBlobs(tmp_path)
    await blobs.open()
    await blobs.put("cd" * 32, b"another")  # opens the folders that are used first
    synced.clear()
    await blobs.put(DIGEST, b"frame")
    assert ("fdatasync", "file") in synced
    assert synced[-1] == ("fsync", "folder") and synced.index(("fdatasync", "file")) < len(synced) - 1
    await blobs.close()
