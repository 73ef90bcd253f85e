"""A folder of blobs knows itself, and who may delete from it."""

import os
from pathlib import Path

import pytest

from forkpoint.errors import StoreUnavailableError
from forkpoint.statestore.codec import digest_of
from forkpoint.statestore.errors import StaleCollectorError
from forkpoint.statestore.file import fence
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.file.ops import SystemFileOps
from tests.support.faults import BROKEN, FaultyOps

ONE, TWO = digest_of(b"1"), digest_of(b"2")


class CountingOps(SystemFileOps):
    """Notes which folders were synced."""

    def __init__(self) -> None:
        self.synced: list[Path] = []

    def sync_folder(self, path: Path) -> None:
        super().sync_folder(path)
        self.synced.append(path)


async def test_a_folder_of_an_older_version_gets_an_identity(tmp_path: Path) -> None:
    first = FileBlobs(tmp_path)
    await first.put(ONE, b"frame")
    (tmp_path / "tier").unlink()
    await first.close()
    again, third = FileBlobs(tmp_path), FileBlobs(tmp_path)
    assert again.tier == third.tier != first.tier
    assert (tmp_path / "tier").read_text() == again.tier + "\n"
    assert await again.has(ONE)
    for blobs in (again, third):
        await blobs.close()


@pytest.mark.parametrize("text", ["", "short\n", "g" * 32 + "\n", "0" * 33])
async def test_a_damaged_identity_is_refused(tmp_path: Path, text: str) -> None:
    await FileBlobs(tmp_path).close()
    (tmp_path / "tier").write_text(text)
    with pytest.raises(StoreUnavailableError, match="identity"):
        FileBlobs(tmp_path)


async def test_a_damaged_fence_lets_nobody_delete(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    await blobs.put(ONE, b"frame")
    (tmp_path / "fence").write_text("seven")
    with pytest.raises(StoreUnavailableError, match="no term"):
        await blobs.delete([ONE], 8)
    assert await blobs.has(ONE)
    await blobs.close()


async def test_a_collector_that_is_stopped_in_a_delete_stops_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence, "LOCK_TRIES", 2)
    blobs = FileBlobs(tmp_path)
    await blobs.put(ONE, b"frame")
    stopped = SystemFileOps().lock(tmp_path / "fence.lock")
    assert stopped is not None
    for call in (blobs.fence(3), blobs.delete([ONE], 3)):
        with pytest.raises(StoreUnavailableError, match="another process collects here"):
            await call
    assert await blobs.has(ONE)
    os.close(stopped)
    await blobs.fence(3)
    await blobs.delete([ONE], 3)
    assert not await blobs.has(ONE)
    await blobs.close()


async def test_a_fence_survives_closing(tmp_path: Path) -> None:
    blobs = FileBlobs(tmp_path)
    await blobs.fence(12)
    await blobs.close()
    again = FileBlobs(tmp_path)
    with pytest.raises(StaleCollectorError) as raised:
        await again.fence(11)
    assert (raised.value.tier, raised.value.term, raised.value.current) == (blobs.tier, 11, 12)
    await again.close()


async def test_a_batch_of_deletes_syncs_each_folder_once_behind_its_names(tmp_path: Path) -> None:
    ops = CountingOps()
    blobs = FileBlobs(tmp_path, ops)
    near = ONE[:4] + TWO[4:]
    for digest in (ONE, near, TWO):
        await blobs.put(digest, b"frame")
    ops.synced.clear()
    await blobs.delete([ONE, near, TWO, digest_of(b"never")])
    assert sorted(ops.synced) == sorted({tmp_path / "blobs" / d[:2] for d in (ONE, TWO)})
    ops.synced.clear()
    await blobs.delete([ONE])
    assert len(ops.synced) == 1, "the delete that was done before may not be durable"
    await blobs.close()


async def test_a_delete_whose_sync_fails_ends_the_service(tmp_path: Path) -> None:
    ops = FaultyOps()
    blobs = FileBlobs(tmp_path, ops)
    await blobs.put(ONE, b"frame")
    ops.sync_folder_errno = BROKEN
    with pytest.raises(StoreUnavailableError):
        await blobs.delete([ONE])
    assert blobs.broken is not None
    await blobs.close()


async def test_a_blob_that_was_collected_and_put_again_is_synced_before_it_counts(tmp_path: Path) -> None:
    ops = CountingOps()
    ours, theirs = FileBlobs(tmp_path, ops), FileBlobs(tmp_path)
    await ours.put(ONE, b"frame")
    assert await ours.has(ONE)
    ops.synced.clear()
    assert await ours.has(ONE)
    assert ops.synced == []
    await theirs.delete([ONE])
    await theirs.put(ONE, b"frame")
    assert await ours.has(ONE)
    assert ops.synced == [tmp_path / "blobs" / ONE[:2]]
    for blobs in (ours, theirs):
        await blobs.close()
