"""Disks that are full, read-only, gone or dying, for real: clear errors, nothing acknowledged is lost, and blobs are
taken again once the cause is gone, except after a sync that failed."""

import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from forkpoint.errors import BlobMissingError, ForkpointError, StoreFullError, StoreUnavailableError
from forkpoint.statestore.codec import digest_of
from forkpoint.statestore.file.blobs import FileBlobs
from tests.support.small_disk import LoopDisk, SmallDisk

Disk = TypeVar("Disk", SmallDisk, LoopDisk)

SMALL = os.urandom(20_000)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    yield from mounted(lambda: SmallDisk(tmp_path / "disk", 4 * 1024))


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[LoopDisk]:
    """64 MiB, of which 24 can really be written."""
    yield from mounted(lambda: LoopDisk(tmp_path / "disk", 64, 24))


def mounted(make: Callable[[], Disk]) -> Iterator[Disk]:
    if os.geteuid() != 0:
        pytest.skip("a file system of its own needs the right to mount one")
    try:
        disk = make()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"can't be mounted here: {error}")
    try:
        yield disk
    finally:
        disk.close()


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[FileBlobs]:
    blobs = FileBlobs(folder)
    try:
        yield blobs
    finally:
        await blobs.close()


async def fill(blobs: FileBlobs, nbytes: int, count: int) -> tuple[dict[str, bytes], ForkpointError]:
    """Put blobs until one is refused; what was acknowledged, and the refusal."""
    acked = dict[str, bytes]()
    for _ in range(count):
        frame = os.urandom(nbytes)
        try:
            await blobs.put(digest_of(frame), frame)
        except (StoreFullError, StoreUnavailableError) as error:
            return acked, error
        acked[digest_of(frame)] = frame
    raise AssertionError("it never got full")


def let_go(blobs: FileBlobs) -> None:
    """Close the store's lock file: one that is open for writing forbids an administrator's unmount or remount."""
    assert blobs._lock is not None
    blobs._ops.unlock(blobs._lock)
    blobs._lock = None


def temporaries(folder: Path) -> list[str]:
    return [path.name for path in (folder / "tmp").iterdir() if path.suffix != ".lock"]


async def test_a_full_disk_is_told_and_blobs_are_taken_again_once_there_is_room(small_disk: SmallDisk) -> None:
    folder = small_disk.folder / "store"
    async with opened(folder) as blobs:
        acked, error = await fill(blobs, 300_000, 100)
        assert isinstance(error, StoreFullError) and len(acked) >= 10
        assert temporaries(folder) == [] and blobs.broken is None
        for digest, frame in acked.items():
            assert await blobs.get(digest) == frame, "reading needs no room"
            assert not await blobs.put(digest, b"other"), "and what is there already is there"
        small_disk.fill()
        with pytest.raises(StoreFullError):
            await blobs.put(digest_of(SMALL), SMALL)
        await blobs.delete(list(acked)[:2])
        small_disk.free()
        assert await blobs.put(digest_of(SMALL), SMALL)
        assert await blobs.get(digest_of(SMALL)) == SMALL


@pytest.mark.parametrize("nbytes", [3000, 700_000])
async def test_ext4_that_is_full_behaves_the_same(ext4: LoopDisk, nbytes: int) -> None:
    ext4.unmount()
    ext4.grow(200)
    ext4.mount()
    async with opened(ext4.folder / "store") as blobs:
        (ext4.folder / "filler").write_bytes(b"")
        with (ext4.folder / "filler").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, free_bytes(ext4.folder) - 3_000_000)
        acked, error = await fill(blobs, nbytes, 2000)
        assert isinstance(error, StoreFullError) and blobs.broken is None
        (ext4.folder / "filler").unlink()
        assert await blobs.put(digest_of(SMALL), SMALL)
        for digest, frame in acked.items():
            assert await blobs.get(digest) == frame


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


async def test_a_read_only_disk_is_told_and_serves_reads_until_it_can_be_written(ext4: LoopDisk) -> None:
    async with opened(ext4.folder / "store") as blobs:
        await blobs.put(digest_of(b"1"), SMALL)
        let_go(blobs)
        ext4.remount("ro")
        for _ in range(2):
            with pytest.raises(StoreUnavailableError, match="Read-only"):
                await blobs.put(digest_of(b"2"), SMALL)
            with pytest.raises(StoreUnavailableError, match="Read-only"):
                await blobs.delete([digest_of(b"1")])
        assert await blobs.get(digest_of(b"1")) == SMALL
        assert await blobs.has(digest_of(b"1"))
        ext4.remount("rw")
        assert blobs.broken is None
        assert await blobs.put(digest_of(b"2"), SMALL)
        await blobs.delete([digest_of(b"1")])


async def test_a_disk_that_is_not_there_misses_nothing_and_has_it_all_when_it_is_back(ext4: LoopDisk) -> None:
    folder = ext4.folder / "store"
    async with opened(folder) as blobs:
        await blobs.put(digest_of(SMALL), SMALL)
        let_go(blobs)
        ext4.unmount()
        for call in (
            blobs.get(digest_of(SMALL)),
            blobs.has(digest_of(SMALL)),
            blobs.put(digest_of(b"2"), SMALL),
            blobs.delete([digest_of(SMALL)]),
            blobs.sizes([digest_of(SMALL)]),
            anext(blobs.digests()),
        ):
            with pytest.raises(StoreUnavailableError):
                await call
        assert not folder.exists(), "nothing is written in its place"
        ext4.mount()
        assert await blobs.get(digest_of(SMALL)) == SMALL
        assert await blobs.put(digest_of(b"2"), SMALL)
        with pytest.raises(BlobMissingError):
            await blobs.get(digest_of(b"3"))


async def test_after_a_sync_that_failed_nothing_is_served_until_the_store_is_made_anew(ext4: LoopDisk) -> None:
    folder = ext4.folder / "store"
    async with opened(folder) as blobs:
        acked, error = await fill(blobs, 1_000_000, 60)
        assert isinstance(error, StoreUnavailableError) and len(acked) >= 5
        assert blobs.broken is not None
        for call in (blobs.put(digest_of(SMALL), SMALL), blobs.get(next(iter(acked)))):
            with pytest.raises(StoreUnavailableError, match="open it again"):
                await call
    ext4.unmount()
    ext4.grow(200)
    ext4.mount()
    async with opened(folder) as again:
        for digest, frame in acked.items():
            assert await again.get(digest) == frame, "what was acknowledged is there"
        assert {digest async for digest in again.digests()} >= acked.keys()
        assert temporaries(folder) == []
        assert await again.put(digest_of(SMALL), SMALL)
