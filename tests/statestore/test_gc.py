"""Garbage collection: what goes, and what stays."""

from dataclasses import replace
from pathlib import Path

import pytest

from forkpoint.errors import BlobMissingError
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.gc import CollectorOptions, collected
from forkpoint.statestore.memory.lru import HostMemoryBlobs
from forkpoint.statestore.records import Pin
from forkpoint.statestore.retention import Drop, RetentionPolicy
from forkpoint.statestore.tiers import Role, Tier, TieredBlobs
from tests.support.collecting import POLICY, Yard, finish
from tests.support.store import name

SECOND_US = 1_000_000
LAZY = CollectorOptions(POLICY, grace_seconds=100)


async def test_a_store_without_garbage_is_left_alone(yard: Yard) -> None:
    await yard.session()
    await yard.save("s", 64)
    before = await yard.digests()
    report = await yard.collect()
    assert (report.blobs_deleted, report.bytes_deleted, report.manifests_removed) == (0, 0, 0)
    assert (report.blobs_marked, report.manifests_kept, report.checkpoints_kept) == (3, 1, 1)
    assert await yard.digests() == before


async def test_an_empty_store_is_collected(yard: Yard) -> None:
    report = await yard.collect()
    assert (report.done, report.blobs_marked, report.stopped) == (True, 0, "")


async def test_dropped_checkpoints_take_what_only_they_had_along(yard: Yard) -> None:
    await yard.session()
    for grid in (64, 80, 96, 128):
        await yard.save("s", grid)
    report = await yard.collect()
    assert await yard.rows() == {"s/c96", "s/c128"}
    assert report.checkpoints_dropped == {Drop.THINNED: 2}
    assert (report.manifests_removed, report.manifests_kept) == (2, 2)
    assert report.blobs_deleted == 2, "the pages and the common part are still named"
    assert report.bytes_deleted > 2 * 64
    assert await yard.missing() == []
    assert await yard.garbage() == set()


async def test_blobs_of_a_save_that_broke_off_go(yard: Yard) -> None:
    await yard.session()
    await yard.save("s", 64)
    await yard.blobs.put("ab" * 32, b"left over")
    report = await yard.collect()
    assert (report.blobs_deleted, report.bytes_deleted) == (1, 9)
    assert not await yard.blobs.has("ab" * 32)


async def test_a_deleted_checkpoint_is_collected_unless_another_session_names_its_manifest(yard: Yard) -> None:
    for session in ("s", "t"):
        await yard.session(session)
        await yard.save(session, 64)
    await yard.catalog.delete_checkpoint(name("s"), "c64")
    assert (await yard.collect()).manifests_removed == 0
    await yard.catalog.delete_checkpoint(name("t"), "c64")
    report = await yard.collect()
    assert (report.manifests_removed, report.blobs_deleted) == (1, 3)
    assert await yard.digests() == set()


async def test_an_unnamed_blob_is_left_alone_for_the_grace(yard: Yard) -> None:
    collector = yard.collector(LAZY)
    await yard.blobs.put("ab" * 32, b"x")
    assert (await finish(collector)).blobs_waiting == 1
    yard.clock.now_us += 99 * SECOND_US
    await yard.blobs.put("cd" * 32, b"y")
    report = await finish(collector)
    assert (report.blobs_waiting, report.blobs_deleted) == (2, 0)
    yard.clock.now_us += 2 * SECOND_US
    report = await finish(collector)
    assert (report.blobs_waiting, report.blobs_deleted) == (1, 1)
    assert await yard.digests() == {"cd" * 32}


async def test_the_grace_begins_again_when_the_blob_was_named_meanwhile(yard: Yard) -> None:
    collector = yard.collector(LAZY)
    await yard.session()
    await yard.save("s", 64)
    await yard.catalog.delete_checkpoint(name("s"), "c64")
    assert (await finish(collector)).blobs_waiting == 3
    yard.clock.now_us += 60 * SECOND_US
    await yard.save("s", 64)
    assert (await finish(collector)).blobs_waiting == 0
    await yard.catalog.delete_checkpoint(name("s"), "c64")
    yard.clock.now_us += 60 * SECOND_US
    report = await finish(collector)
    assert (report.blobs_waiting, report.blobs_deleted) == (3, 0)


async def test_a_new_collector_knows_no_grace_of_another(yard: Yard) -> None:
    await yard.blobs.put("ab" * 32, b"x")
    first = yard.collector(LAZY)
    await finish(first)
    yard.clock.now_us += 200 * SECOND_US
    await first.election.resign()
    assert (await yard.collect(yard.collector(LAZY, "second"))).blobs_deleted == 0


async def test_a_pinned_manifest_and_its_blobs_stay(yard: Yard) -> None:
    await yard.session()
    await yard.register("i1")
    saved = await yard.save("s", 64)
    await yard.catalog.pin(Pin("p", "i1", saved.row.manifest_key))
    await yard.catalog.delete_checkpoint(name("s"), "c64")
    report = await yard.collect()
    assert (report.manifests_removed, report.blobs_deleted, report.pins_dropped) == (0, 0, 0)
    await yard.catalog.unpin("p")
    assert (await yard.collect()).blobs_deleted == 3


async def test_a_pin_of_a_node_that_is_gone_is_dropped(yard: Yard) -> None:
    await yard.session()
    for incarnation in ("i1", "i2"):
        await yard.register(incarnation)
    saved = await yard.save("s", 64)
    for pin, holder in (("p1", "i1"), ("p2", "i2")):
        await yard.catalog.pin(Pin(pin, holder, saved.row.manifest_key))
    await yard.catalog.delete_checkpoint(name("s"), "c64")
    await yard.catalog.remove_node("i1")
    assert (await yard.collect()).pins_dropped == 1
    assert [pin.pin for pin in await yard.catalog.list_pins()] == ["p2"]
    await yard.catalog.remove_node("i2")
    report = await yard.collect()
    assert (report.pins_dropped, report.manifests_removed, report.blobs_deleted) == (1, 1, 3)


async def test_a_fork_keeps_what_its_parent_would_drop(yard: Yard) -> None:
    await yard.session()
    for grid in (16, 32, 48, 64, 80):
        await yard.save("s", grid)
    await yard.fork("s", "child", 40)
    await yard.collect()
    assert await yard.rows() == {"s/c32", "s/c64", "s/c80"}
    assert (await yard.usable("child")).checkpoint == "c32"  # type: ignore[union-attr]
    await yard.catalog.delete_session(name("child"), purge_us=0)
    await yard.collect()
    assert await yard.rows() == {"s/c64", "s/c80"}


async def test_a_forked_child_keeps_its_fork_point_also_once_it_has_its_own(yard: Yard) -> None:
    await yard.session()
    for grid in (16, 32, 48, 64, 80):
        await yard.save("s", grid)
    await yard.fork("s", "child", 40)
    await yard.append("child", 100)
    for grid in (48, 64):
        await yard.save("child", grid, "own" + str(grid))
    await yard.collect()
    assert await yard.rows() == {"s/c32", "s/c64", "s/c80", "child/own48", "child/own64"}


async def test_a_deleted_parent_gives_a_child_what_it_needs_and_nothing_else(yard: Yard) -> None:
    await yard.session()
    for grid in (16, 32, 48, 64):
        await yard.save("s", grid)
    await yard.save("s", 16, "asked", automatic=False)
    await yard.fork("s", "child", 40)
    await yard.catalog.delete_session(name("s"), purge_us=yard.clock.now_us + 100 * SECOND_US)
    await yard.collect()
    assert await yard.rows() == {"s/c32", "s/c64", "s/asked"}, "it may come back"
    yard.clock.now_us += 200 * SECOND_US
    report = await yard.collect()
    assert await yard.rows() == {"s/c32"}
    assert report.checkpoints_dropped == {Drop.SESSION_GONE: 2}
    assert await yard.missing() == []


async def test_after_a_rewind_the_branch_that_was_left_goes(yard: Yard) -> None:
    await yard.session()
    for grid in (16, 32, 48, 64):
        await yard.save("s", grid)
    await yard.catalog.rewind(name("s"), 1, 40)
    report = await yard.collect()
    assert await yard.rows() == {"s/c16", "s/c32"}
    assert report.checkpoints_dropped == {Drop.OFF_CHAIN: 2}


async def test_a_checkpoint_exactly_at_the_head_does_not_cost_the_one_below(yard: Yard) -> None:
    """To sample at its head a session needs a state below it."""
    await yard.session()
    for grid in (32, 48, 64, 80, 96):
        await yard.save("s", grid)
    await yard.fork("s", "child", 64)
    await yard.collect()
    assert await yard.rows() == {"s/c48", "s/c64", "s/c80", "s/c96"}


async def test_each_kind_of_node_keeps_a_checkpoint_that_it_can_use(yard: Yard) -> None:
    await yard.session()
    for incarnation, numerics_id in (("i1", "n"), ("i2", "old")):
        await yard.register(incarnation, numerics_id)
    saved = await yard.save("s", 16)
    old = replace(saved.row, checkpoint="old", numerics_id="old")
    await yard.catalog.put_checkpoint(old, saved.manifest, 1)
    for grid in (32, 48, 64):
        await yard.save("s", grid)
    await yard.collect()
    assert await yard.rows() == {"s/old", "s/c48", "s/c64"}
    await yard.catalog.remove_node("i2")
    await yard.collect()
    assert await yard.rows() == {"s/c48", "s/c64"}


async def test_checkpoints_expire(yard: Yard) -> None:
    await yard.session()
    saved = await yard.save("s", 16)
    expiring = replace(saved.row, checkpoint="asked", automatic=False, expire_us=yard.clock.now_us + 50 * SECOND_US)
    await yard.catalog.put_checkpoint(expiring, saved.manifest, 1)
    for grid in (32, 48):
        await yard.save("s", grid)
    await yard.collect()
    assert "s/asked" in await yard.rows()
    yard.clock.now_us += 60 * SECOND_US
    report = await yard.collect()
    assert report.checkpoints_dropped == {Drop.EXPIRED: 1}
    assert await yard.rows() == {"s/c32", "s/c48"}


async def test_a_dry_run_says_what_would_go_and_changes_nothing(yard: Yard) -> None:
    await yard.session()
    for grid in (64, 80, 96, 128):
        await yard.save("s", grid)
    await yard.blobs.put("ab" * 32, b"left over")
    rows, digests = await yard.rows(), await yard.digests()
    dry = await yard.collect(dry_run=True)
    assert (await yard.rows(), await yard.digests()) == (rows, digests)
    assert (await yard.catalog.get_collector(yard.blobs.tier)).term == 0
    assert [(verdict.row.checkpoint, verdict.reason) for verdict in dry.dropped] == [
        ("c64", Drop.THINNED),
        ("c80", Drop.THINNED),
    ]
    real = await yard.collect()
    assert len(dry.removed) == real.manifests_removed == 2
    assert digests - await yard.digests() == set(dry.doomed)
    for field in ("blobs_deleted", "bytes_deleted", "blobs_marked", "manifests_kept", "manifests_removed"):
        assert getattr(dry, field) == getattr(real, field), field
    assert dry.checkpoints_dropped == real.checkpoints_dropped


async def test_a_manifest_that_cannot_be_read_stops_every_delete(yard: Yard) -> None:
    await yard.session()
    saved = await yard.save("s", 64)
    await yard.blobs.put("ab" * 32, b"left over")
    await yard.catalog.put_checkpoint(replace(saved.row, checkpoint="x"), b"damaged", 1, replace_manifest=True)
    report = await yard.collect()
    assert "can't be read" in report.stopped
    assert report.blobs_deleted == 0
    assert len(await yard.digests()) == 4
    await yard.save("s", 64, "healed")
    report = await yard.collect()
    assert (report.stopped, report.blobs_deleted) == ("", 1)


async def test_a_budget_drops_what_sessions_do_not_need(yard: Yard) -> None:
    await yard.session()
    for grid in (64, 80, 96, 112):
        await yard.save("s", grid)
    await yard.save("s", 96, "asked", automatic=False)
    policy = RetentionPolicy(4, 0)
    (size,) = await yard.blobs.sizes(sorted(await yard.digests())[:1])
    assert size is not None
    options = CollectorOptions(policy, grace_seconds=0, budget_bytes=5 * size)
    dry = await yard.collect(yard.collector(options, "dry"), dry_run=True)
    report = await yard.collect(yard.collector(options))
    assert await yard.rows() == {"s/c80", "s/c96", "s/asked", "s/c112"}, "the oldest goes, and no more than that"
    assert report.checkpoints_dropped == dry.checkpoints_dropped == {Drop.OVER_BUDGET: 1}
    assert report.bytes_over_budget == 0
    assert len(await yard.digests()) == 5
    options = replace(options, budget_bytes=1)
    report = await yard.collect(yard.collector(options))
    assert await yard.rows() == {"s/c96", "s/asked", "s/c112"}
    assert report.bytes_over_budget == 4 * size - 1
    assert await yard.missing() == []


async def test_reading_a_collected_checkpoint_fails_clearly(yard: Yard) -> None:
    await yard.session()
    saved = await yard.save("s", 64)
    await yard.catalog.delete_checkpoint(name("s"), "c64")
    await yard.collect()
    with pytest.raises(BlobMissingError):
        [part async for part in yard.store().load(saved.manifest, [part.spec for part in saved.parts])]


async def test_a_cache_beyond_its_budget_loses_blobs_and_costs_no_checkpoint(yard: Yard) -> None:
    await yard.session()
    await yard.register("node")
    saved = [await yard.save("s", grid) for grid in (64, 80, 96)]
    await yard.catalog.pin(Pin("p", "node", saved[0].row.manifest_key))
    (size,) = await yard.blobs.sizes(sorted(await yard.digests())[:1])
    assert size is not None
    options = CollectorOptions(RetentionPolicy(3, 0), grace_seconds=0, budget_bytes=4 * size, cache=True)
    dry = await yard.collect(yard.collector(options, "dry"), dry_run=True)
    report = await yard.collect(yard.collector(options))
    assert (dry.blobs_evicted, dry.bytes_evicted) == (report.blobs_evicted, report.bytes_evicted) == (1, size)
    assert await yard.missing() == [saved[1].parts[-1].digest], "the oldest that is not pinned"
    assert (report.checkpoints_dropped, report.bytes_over_budget) == ({}, 0)
    report = await yard.collect(yard.collector(replace(options, budget_bytes=1)))
    assert report.bytes_over_budget == 3 * size - 1
    assert await yard.digests() == {part.digest for part in saved[0].parts}


async def test_of_a_stack_each_durable_tier_and_each_cache_on_disk_is_collected(tmp_path: Path) -> None:
    disk, shared = FileBlobs(tmp_path / "cache"), FileBlobs(tmp_path / "shared")
    stack = TieredBlobs(
        [
            Tier("memory", HostMemoryBlobs(1000), Role.CACHE),
            Tier("disk", disk, Role.CACHE),
            Tier("shared", shared),
        ]
    )
    await stack.open()
    assert collected(stack, LAZY) == [(disk, replace(LAZY, cache=True)), (shared, LAZY)]
    assert collected(shared, LAZY) == [(shared, LAZY)]
    await stack.close()
