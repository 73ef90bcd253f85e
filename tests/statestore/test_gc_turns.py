"""Whose turn it is to collect, and what savers see of it."""

import pytest

from forkpoint.ids import SessionName
from forkpoint.statestore.errors import BlobsCondemnedError, CollectedElsewhereError, StaleCollectorError
from forkpoint.statestore.gc import CollectorOptions
from forkpoint.statestore.records import CheckpointRow
from tests.support.collecting import EAGER, POLICY, Yard, finish
from tests.support.store import name

SECOND_US = 1_000_000
LAZY = CollectorOptions(POLICY, grace_seconds=100)


async def test_one_collects_while_it_lives(yard: Yard) -> None:
    first, second = yard.collector(holder="first"), yard.collector(holder="second")
    await finish(first)
    with pytest.raises(CollectedElsewhereError):
        await finish(second)
    assert second.election.other == "first"
    for _ in range(4):
        yard.clock.now_us += 15 * SECOND_US
        await finish(first)
        with pytest.raises(CollectedElsewhereError):
            await finish(second)
    yard.clock.now_us += 21 * SECOND_US
    await finish(second)
    with pytest.raises(CollectedElsewhereError):
        await finish(first)
    assert first.election.other == "second"
    await second.election.resign()
    await finish(first)


@pytest.mark.parametrize("options", [LAZY, EAGER], ids=["lazy", "eager"])
async def test_a_collection_that_broke_off_is_finished_by_the_next(yard: Yard, options: CollectorOptions) -> None:
    await yard.session()
    await yard.save("s", 64)
    named, lost = sorted(await yard.digests())[0], "ab" * 32
    await yard.blobs.put(lost, b"left over")
    tier = yard.blobs.tier
    await yard.catalog.elect_collector(tier, "dead", 0)
    await yard.catalog.condemn(tier, 1, [named, lost])
    with pytest.raises(BlobsCondemnedError):
        await yard.save("s", 64, "refused")
    report = await yard.collect(yard.collector(options))
    assert report.blobs_deleted == 1, "what was condemned has had its grace"
    assert await yard.catalog.list_condemned(tier, "", 9) == []
    assert await yard.missing() == []
    await yard.save("s", 64, "again")


async def test_what_a_node_condemned_in_a_tier_of_its_own_is_absolved_once_it_is_gone(yard: Yard) -> None:
    await yard.session()
    await yard.save("s", 64)
    digests = sorted(await yard.digests())
    await yard.register("gone")
    await yard.catalog.elect_collector("its own", "gone", 0)
    await yard.catalog.condemn("its own", 1, digests)
    collector = yard.collector()
    await finish(collector)
    yard.clock.now_us += 60 * SECOND_US
    await finish(collector)
    assert await yard.catalog.list_condemned("its own", "", 9) == digests, "it is still registered"
    await yard.catalog.remove_node("gone")
    await finish(collector)
    yard.clock.now_us += 60 * SECOND_US
    await finish(collector)
    assert await yard.catalog.list_condemned("its own", "", 9) == []
    with pytest.raises(StaleCollectorError):
        await yard.catalog.absolve("its own", 1, digests)


async def test_notes_of_absolutions_are_forgotten_a_collection_later(yard: Yard) -> None:
    collector = yard.collector()
    for index in range(4):
        await yard.blobs.put(f"{index:02x}" * 32, b"x")
        await finish(collector)
    assert await yard.catalog.absolutions() == 4
    await yard.session()
    row = CheckpointRow(SessionName("w", "s"), "c", 1, 0, await root(yard), "n", True, 0)
    with pytest.raises(BlobsCondemnedError):
        await yard.catalog.put_checkpoint(row, b"m", 1, digests=["ee" * 32], since=2)
    await yard.catalog.put_checkpoint(row, b"m", 1, digests=["ee" * 32], since=3)


async def root(yard: Yard) -> bytes:
    await yard.fork("s", "root", 0)
    return (await yard.catalog.get_session(name("root"))).head_hash


async def test_a_save_whose_blobs_are_collected_meanwhile_stores_them_again(yard: Yard) -> None:
    await yard.session()
    await yard.save("s", 64)
    await yard.catalog.delete_checkpoint(name("s"), "c64")
    collections: list[int] = []
    inner_has, turns = yard.blobs.has, iter([True])

    async def has(digest: str) -> bool:
        found = await inner_has(digest)
        if found and next(turns, False):
            collections.append((await finish(yard.collector())).blobs_deleted)
        return found

    yard.blobs.has = has  # type: ignore[method-assign]
    saved = await yard.save("s", 64, "again")
    assert collections == [3]
    assert await yard.missing() == []
    assert not any(part.shared for part in saved.parts)
    assert saved.bytes_stored > 0


async def test_a_save_gives_up_on_a_collector_that_does_not_get_on(yard: Yard) -> None:
    await yard.session()
    await yard.save("s", 64)
    tier = yard.blobs.tier
    await yard.catalog.elect_collector(tier, "stuck", 0)
    await yard.catalog.condemn(tier, 1, sorted(await yard.digests())[:1])
    before = yard.clock.now_us
    with pytest.raises(BlobsCondemnedError):
        await yard.save("s", 64, "again")
    assert yard.clock.now_us - before > 20 * SECOND_US
    assert await yard.rows() == {"s/c64"}
