"""Blob files: temporaries, full disks, failed syncs, damaged folders."""

import asyncio
import sys
from pathlib import Path

import pytest

from forkpoint.errors import BlobMissingError, ConfigError, StoreFullError, StoreUnavailableError
from forkpoint.statestore.codec import digest_of
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.open import open_blobs, open_catalog, read_marker
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.support.faults import BROKEN, FULL, FaultyOps
from tests.support.store import MARKER

ONE, TWO = digest_of(b"1"), digest_of(b"2")


def temporaries(root: Path) -> list[str]:
    return [path.name for path in (root / "tmp").iterdir() if path.suffix != ".lock"]


async def test_a_blob_lies_two_folders_deep_under_its_digest(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path / "deep" / "store")
    await blobs.put(ONE, b"frame")
    path = tmp_path / "deep" / "store" / "blobs" / ONE[:2] / ONE
    assert path.read_bytes() == b"frame"
    assert path.stat().st_mode & 0o077 == 0
    await blobs.close()
    assert list((tmp_path / "deep" / "store" / "tmp").iterdir()) == []


async def test_temporaries_of_the_dead_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    living = FileBlobs(tmp_path)
    mine = tmp_path / "tmp" / f"{living._token}.1-abc"
    mine.write_bytes(b"being written")
    for stale in ("0123456789abcdef.7-abc", "0123456789abcdef.lock", "fedcba9876543210.1-x"):
        (tmp_path / "tmp" / stale).write_bytes(b"half")
    other = FileBlobs(tmp_path)
    left = {path.name for path in (tmp_path / "tmp").iterdir()}
    assert left == {mine.name, f"{living._token}.lock", f"{other._token}.lock"}
    await living.close()
    await other.close()


async def test_a_full_disk_leaves_nothing_and_passes_once_there_is_room(tmp_path: Path) -> None:
    ops = FaultyOps()
    blobs = FileBlobs(tmp_path, ops)
    for attribute in ("write_errno", "rename_errno"):
        setattr(ops, attribute, FULL)
        with pytest.raises(StoreFullError):
            await blobs.put(ONE, b"frame")
        assert not await blobs.has(ONE)
        assert temporaries(tmp_path) == [] and blobs.broken is None
        setattr(ops, attribute, 0)
    assert await blobs.put(ONE, b"frame")
    await blobs.close()


@pytest.mark.parametrize("attribute", ["write_errno", "sync_folder_errno"])
async def test_after_a_failed_sync_the_store_is_served_no_more_until_opened_again(
    tmp_path: Path, attribute: str
) -> None:
    ops = FaultyOps()
    blobs = FileBlobs(tmp_path, ops)
    await blobs.put(ONE, b"frame")
    setattr(ops, attribute, BROKEN)
    with pytest.raises(StoreUnavailableError):
        await blobs.put(TWO, b"frame")
    setattr(ops, attribute, 0)
    assert blobs.broken is not None
    with pytest.raises(StoreUnavailableError, match="open it again"):
        await blobs.put(TWO, b"frame")
    with pytest.raises(StoreUnavailableError):
        await blobs.get(ONE)
    await blobs.close()
    again = FileBlobs(tmp_path)
    assert await again.get(ONE) == b"frame"
    assert temporaries(tmp_path) == []
    await again.put(TWO, b"frame")
    await again.close()


async def test_a_read_error_is_an_error_and_not_a_missing_blob(tmp_path: Path) -> None:
    ops = FaultyOps()
    blobs = FileBlobs(tmp_path, ops)
    await blobs.put(ONE, b"frame")
    ops.read_errno = BROKEN
    with pytest.raises(StoreUnavailableError):
        await blobs.get(ONE)
    ops.read_errno = 0
    assert await blobs.get(ONE) == b"frame"
    await blobs.close()


@pytest.mark.parametrize("digest", ["", "../../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n"])
async def test_what_is_no_digest_names_no_file(tmp_path: Path, digest: str) -> None:
    blobs = FileBlobs(tmp_path)
    with pytest.raises(ValueError, match="no BLAKE3 digest"):
        await blobs.put(digest, b"frame")
    with pytest.raises(ValueError, match="no BLAKE3 digest"):
        await blobs.get(digest)
    await blobs.close()


async def test_names_known_to_be_durable_are_forgotten_by_many_threads_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkpoint.statestore.file.blobs.DURABLE_NAMES_MAX", 3)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    blobs = FileBlobs(tmp_path)
    try:
        digests = [digest_of(bytes([index])) for index in range(120)]
        assert all(await asyncio.gather(*(blobs.put(digest, b"frame") for digest in digests)))
        assert all(await asyncio.gather(*(blobs.has(digest) for digest in digests * 3)))
        assert len(blobs._durable) <= 3
    finally:
        sys.setswitchinterval(interval)
        await blobs.close()


async def test_strange_files_are_not_listed(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    await blobs.put(ONE, b"frame")
    (tmp_path / "blobs" / ONE[:2] / "README").write_text("hello")
    (tmp_path / "blobs" / "lost+found").write_text("")
    assert [digest async for digest in blobs.digests()] == [ONE]
    with pytest.raises(BlobMissingError):
        await blobs.get(TWO)
    await blobs.close()


async def test_urls_choose_the_backend(tmp_path: Path) -> None:
    assert isinstance(open_catalog("memory://"), MemoryCatalog)
    assert isinstance(open_blobs("memory://"), MemoryBlobs)
    blobs = open_blobs(f"file://{tmp_path}/with%20space")
    assert isinstance(blobs, FileBlobs)
    assert (tmp_path / "with space" / "blobs").is_dir()
    await blobs.close()
    url = f"sqlite://{tmp_path}/catalog.db"
    assert read_marker(url) is None
    catalog = open_catalog(url)
    assert isinstance(catalog, SqliteCatalog)
    await catalog.open(MARKER)
    assert read_marker(url) == MARKER
    await catalog.close()
    assert read_marker(url) == MARKER


@pytest.mark.parametrize(
    "url",
    ["redis://", "redis+sentinel://host", "s3://bucket", "relative", "sqlite://relative", "sqlite:///", "sqlite://h/p"],
)
def test_a_url_that_names_no_backend_says_what_would(url: str) -> None:
    with pytest.raises(ConfigError, match=r"expected|no such catalog|names no host"):
        open_catalog(url)
    with pytest.raises(ConfigError):
        open_blobs(url.replace("sqlite", "file"))
