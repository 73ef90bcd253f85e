"""Blob stores: whole frames under digests, or nothing."""

import asyncio
from pathlib import Path

import pytest

from forkpoint.errors import BlobMissingError, StoreUnavailableError
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.codec import digest_of, encode
from forkpoint.statestore.errors import StaleCollectorError
from tests.conformance.backends import Backend

DIGESTS = [digest_of(bytes([index])) for index in range(20)]


async def test_a_frame_comes_back_as_it_was_put(blobs: BlobStore) -> None:
    frame = encode(bytes(range(256)) * 4000)
    assert await blobs.put(DIGESTS[0], frame)
    assert await blobs.get(DIGESTS[0]) == frame
    assert await blobs.has(DIGESTS[0])


async def test_an_empty_frame_is_a_frame(blobs: BlobStore) -> None:
    assert await blobs.put(DIGESTS[0], b"")
    assert await blobs.get(DIGESTS[0]) == b""


async def test_a_second_put_keeps_the_first_frame(blobs: BlobStore) -> None:
    assert await blobs.put(DIGESTS[0], b"first")
    assert not await blobs.put(DIGESTS[0], b"second")
    assert await blobs.get(DIGESTS[0]) == b"first"


async def test_replace_puts_a_frame_over_a_damaged_one_and_where_there_is_none(blobs: BlobStore) -> None:
    await blobs.put(DIGESTS[0], b"damaged")
    for digest in DIGESTS[:2]:
        await blobs.replace(digest, b"whole")
        assert await blobs.get(digest) == b"whole"


async def test_what_was_never_put_is_missing(blobs: BlobStore) -> None:
    assert not await blobs.has(DIGESTS[0])
    with pytest.raises(BlobMissingError) as raised:
        await blobs.get(DIGESTS[0])
    assert raised.value.digest == DIGESTS[0]


async def test_delete_is_idempotent(blobs: BlobStore) -> None:
    await blobs.put(DIGESTS[0], b"x")
    await blobs.delete(DIGESTS[:1])
    await blobs.delete(DIGESTS[:2])
    await blobs.delete([])
    assert not await blobs.has(DIGESTS[0])
    assert await blobs.put(DIGESTS[0], b"y")


async def test_all_digests_are_listed(blobs: BlobStore) -> None:
    assert [digest async for digest in blobs.digests()] == []
    for digest in DIGESTS:
        await blobs.put(digest, b"x")
    await blobs.delete([DIGESTS[3]])
    assert {digest async for digest in blobs.digests()} == set(DIGESTS) - {DIGESTS[3]}


async def test_puts_of_one_digest_at_once_store_one_whole_frame(blobs: BlobStore) -> None:
    frames = [bytes([index]) * 50_000 for index in range(8)]
    results = await asyncio.gather(*(blobs.put(DIGESTS[0], frame) for frame in frames))
    assert any(results)
    assert await blobs.get(DIGESTS[0]) in frames


async def test_a_cancelled_put_left_the_whole_blob_or_none(blobs: BlobStore) -> None:
    frame = bytes(200_000)
    for index, digest in enumerate(DIGESTS[:8]):
        async with asyncio.TaskGroup() as group:
            task = group.create_task(blobs.put(digest, frame))
            for _ in range(index):
                await asyncio.sleep(0)
            task.cancel()
        try:
            assert await blobs.get(digest) == frame
        except BlobMissingError:
            assert await blobs.put(digest, frame) or await blobs.get(digest) == frame


async def test_calls_after_close_are_unavailable(blobs: BlobStore) -> None:
    await blobs.close()
    await blobs.close()
    with pytest.raises(StoreUnavailableError):
        await blobs.put(DIGESTS[0], b"x")
    with pytest.raises(StoreUnavailableError):
        await blobs.get(DIGESTS[0])


async def test_sizes_are_of_what_is_there(blobs: BlobStore) -> None:
    await blobs.put(DIGESTS[0], b"x" * 1000)
    await blobs.put(DIGESTS[2], b"")
    assert await blobs.sizes(DIGESTS[:3]) == [1000, None, 0]
    assert await blobs.sizes([]) == []


async def test_a_place_has_an_identity_of_its_own(blobs: BlobStore, blob_backend: Backend, folder: Path) -> None:
    assert blob_backend.blobs is not None
    (folder / "elsewhere").mkdir()
    stranger = blob_backend.blobs(folder / "elsewhere")
    await stranger.open()
    assert blobs.tier
    assert stranger.tier != blobs.tier
    await stranger.close()
    if blob_backend.persistent:
        again = blob_backend.blobs(folder)
        await again.open()
        assert again.tier == blobs.tier
        await again.close()


async def test_a_collector_deletes_under_the_highest_term_only(blobs: BlobStore) -> None:
    for digest in DIGESTS[:3]:
        await blobs.put(digest, b"x")
    await blobs.delete(DIGESTS[:1])
    await blobs.fence(2)
    await blobs.fence(2)
    for term in (0, 1):
        with pytest.raises(StaleCollectorError):
            await blobs.delete(DIGESTS[1:2], term)
    with pytest.raises(StaleCollectorError):
        await blobs.fence(1)
    assert [await blobs.has(digest) for digest in DIGESTS[:3]] == [False, True, True]
    await blobs.delete(DIGESTS[1:2], 2)
    await blobs.delete(DIGESTS[2:3], 7)
    assert [await blobs.has(digest) for digest in DIGESTS[:3]] == [False, False, False]
    await blobs.delete(DIGESTS[:1], 3)


async def test_a_fence_holds_for_whoever_opens_the_place(blobs: BlobStore, blob_backend: Backend, folder: Path) -> None:
    if blob_backend.blobs is None or not blob_backend.persistent:
        return
    again = blob_backend.blobs(folder)
    await again.open()
    await blobs.put(DIGESTS[0], b"x")
    await again.fence(5)
    with pytest.raises(StaleCollectorError):
        await blobs.delete(DIGESTS[:1], 4)
    assert await again.has(DIGESTS[0])
    await blobs.delete(DIGESTS[:1], 5)
    assert not await again.has(DIGESTS[0])
    await again.close()
