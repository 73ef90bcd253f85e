"""Retention and garbage collection as a node does them: nothing that a session needs goes, the rest does."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from forkpoint.errors import NotFoundError, StoreUnavailableError
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session import garbage
from forkpoint.server.session.api import GenerateCall
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.errors import CollectedElsewhereError
from forkpoint.statestore.gcreport import CollectionReport
from forkpoint.statestore.records import CheckpointPolicy, Pin
from forkpoint.statestore.retention import Drop, RetentionPolicy
from tests.support.hash_engine import continuation
from tests.support.session_site import FAST, WORKFLOW, Running, Site, key, until

PROMPT = list(range(1, 84))
"""The last grid point is 80, below the head: a restore that samples can use it."""
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)
NONE = CheckpointPolicy(0)
EAGER = replace(FAST, retention=RetentionPolicy(2, 0), gc_grace_seconds=0.0)


async def collect(node: Running, dry_run: bool = False) -> CollectionReport:
    *_, report = [report async for report in node.node.collect_garbage(dry_run)]
    assert report.done and not report.stopped
    return report


async def grids(node: Running, name: SessionName) -> list[int]:
    return [view.row.grid_position for view in await node.node.list_checkpoints(name)]


async def tiles(node: Running, name: SessionName) -> None:
    """Six tiles, with a checkpoint behind each that is written before the next one is captured."""
    for tile in range(6):
        await node.append(name, [7] * 16)
        await until(lambda tile=tile: node.node.counters.checkpoints_written == tile + 1)  # type: ignore[misc]


async def test_a_deleted_checkpoint_is_gone_and_answers_the_same_again(site: Site) -> None:
    node = await site.node(options=EAGER)
    await node.workflow()
    name = await node.session("s", policy=NONE)
    await node.append(name, PROMPT)
    made = await node.node.create_checkpoint(name, "c", key("create"))
    gone = await node.node.delete_checkpoint(name, "c", key("delete"))
    assert (gone.row, gone.parts) == (made.row, ())
    with pytest.raises(NotFoundError):
        await node.node.get_checkpoint(name, "c")
    assert (await collect(node)).blobs_deleted == len(made.parts)
    assert await node.node.delete_checkpoint(name, "c", key("delete")) == gone
    assert (await node.node.create_checkpoint(name, "c", key("create"))).row == made.row, "it was made, once"
    with pytest.raises(NotFoundError):
        await node.node.delete_checkpoint(name, "c", key("another"))


async def test_a_state_whose_checkpoint_was_deleted_is_stored_again_when_it_is_needed(site: Site) -> None:
    node = await site.node(options=EAGER)
    await node.workflow()
    name = await node.session("s", policy=NONE)
    await node.append(name, PROMPT)
    await node.node.create_checkpoint(name, "c", None)
    await node.node.delete_checkpoint(name, "c", None)
    await collect(node)
    await node.node.pause(name, None)
    assert await grids(node, name) == [80]
    result = await node.node.resume(name, None)
    assert result.restored_tokens == 80


async def test_a_collection_keeps_the_last_and_what_forks_need(site: Site) -> None:
    node = await site.node(options=EAGER)
    await node.workflow()
    name = await node.session("s", policy=CheckpointPolicy(16))
    await tiles(node, name)
    await node.fork(name, "child", position=40)
    dry = await collect(node, dry_run=True)
    report = await collect(node)
    assert report.checkpoints_dropped == dry.checkpoints_dropped == {Drop.THINNED: 3}
    assert await grids(node, name) == [32, 80, 96]
    child = SessionName(WORKFLOW, "child")
    read = await node.generate(GenerateCall(child, key("g"), max_tokens=20))
    assert read.tokens == continuation([7] * 40, 20, GREEDY)[0]
    assert (node.node.counters.restored_tokens, node.node.counters.fallback_restores) == (32, 0)


async def test_a_session_may_keep_more(site: Site) -> None:
    node = await site.node(options=EAGER)
    await node.workflow()
    name = await node.session("s", policy=CheckpointPolicy(16, keep_last=4))
    await tiles(node, name)
    await collect(node)
    assert await grids(node, name) == [48, 64, 80, 96]


async def test_a_node_collects_by_itself(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "COLLECTOR_RENEW_SECONDS", 0.005)
    node = await site.node(options=replace(EAGER, gc_interval_seconds=0.01))
    await node.workflow()
    await site.blobs.put("ab" * 32, b"left over")
    async with asyncio.timeout(10):
        while await site.blobs.has("ab" * 32):
            await asyncio.sleep(0.01)
    counters = node.node.counters
    await until(lambda: counters.blobs_deleted == 1)
    assert (counters.collections > 0, counters.bytes_deleted) == (True, 9)


async def test_a_collection_that_fails_comes_again(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "COLLECTOR_RENEW_SECONDS", 0.005)
    node = await site.node(options=replace(EAGER, gc_interval_seconds=0.01))
    node.faults.before["scan_manifests"] = StoreUnavailableError("catalog", "out of reach")
    await site.blobs.put("ab" * 32, b"left over")
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert node.node.counters.collections == 0
    node.faults.heal()
    await until(lambda: node.node.counters.blobs_deleted == 1)


async def test_one_node_collects_and_the_next_goes_on_when_it_leaves(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "COLLECTOR_RENEW_SECONDS", 0.005)
    first = await site.node(options=replace(EAGER, gc_interval_seconds=0.01))
    await until(lambda: first.node.counters.collections > 0)
    second = await site.node(options=EAGER)
    with pytest.raises(CollectedElsewhereError) as refused:
        await collect(second)
    assert refused.value.holder == first.node.incarnation
    await first.stop()
    await site.blobs.put("ab" * 32, b"left over")
    assert (await collect(second)).blobs_deleted == 1


async def test_what_a_collector_left_is_finished_when_a_node_starts(site: Site) -> None:
    node = await site.node(options=EAGER)
    tier = site.blobs.tier
    await site.blobs.put("ab" * 32, b"left over")
    await node.catalog.elect_collector(tier, "killed", 0)
    await node.catalog.condemn(tier, 1, ["ab" * 32])
    await node.catalog.resign_collector(tier, 1)
    again = await site.node(options=EAGER)
    await until(lambda: node.node.counters.blobs_deleted + again.node.counters.blobs_deleted == 1)
    assert await node.catalog.list_condemned(tier, "", 9) == []
    async with asyncio.timeout(10):
        while (await node.catalog.get_collector(tier)).holder:
            await asyncio.sleep(0.002)


async def test_the_work_of_a_node_that_was_killed_goes_on_once_it_is_known_dead(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "COLLECTOR_RENEW_SECONDS", 0.005)
    rarely = replace(EAGER, gc_interval_seconds=1000.0)
    first = await site.node(options=rarely)
    await collect(first)
    tier = site.blobs.tier
    row = await first.catalog.get_collector(tier)
    assert row.holder == first.node.incarnation
    await site.blobs.put("ab" * 32, b"left over")
    await first.catalog.condemn(tier, row.term, ["ab" * 32])
    await first.crash()
    second = await site.node(options=rarely)
    await until(lambda: second.node.counters.blobs_deleted == 1)
    assert (await second.catalog.get_collector(tier)).holder == second.node.incarnation


async def test_a_restore_pins_what_it_reads_and_lets_go_of_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    node = await site.node(options=EAGER)
    await node.workflow()
    name = await node.session("s", policy=NONE)
    await node.append(name, PROMPT)
    await node.idle(name)
    await node.node.pause(name, None)
    seen: list[Pin] = []
    load = CheckpointStore.load_groups

    async def watched(self: CheckpointStore, *args: Any) -> AsyncGenerator[Any, None]:
        seen.extend(await node.catalog.list_pins())
        async for loaded in load(self, *args):
            yield loaded

    monkeypatch.setattr(CheckpointStore, "load_groups", watched)
    await node.node.resume(name, None)
    assert [(pin.holder, pin.key.grid_position) for pin in seen] == [(node.node.incarnation, 80)]
    async with asyncio.timeout(10):
        while await node.catalog.list_pins():
            await asyncio.sleep(0.002)


async def test_a_pin_that_cannot_be_taken_away_goes_with_the_next(site: Site) -> None:
    node = await site.node(options=EAGER)
    await node.workflow()
    name = await node.session("s", policy=NONE)
    await node.append(name, PROMPT)
    await node.node.create_checkpoint(name, "c", None)
    node.faults.before["unpin"] = StoreUnavailableError("catalog", "out of reach")
    assert {check.problem async for check in node.node.verify_checkpoint(name, "c")} == {""}
    assert len(await node.catalog.list_pins()) == 1
    node.faults.heal()
    assert {check.problem async for check in node.node.verify_checkpoint(name, "c")} == {""}
    async with asyncio.timeout(10):
        while await node.catalog.list_pins():
            await asyncio.sleep(0.002)


async def test_a_checkpoint_that_is_collected_before_it_is_pinned_is_passed_over(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = await site.node(options=EAGER)
    await node.workflow()
    name = await node.session("s", policy=NONE)
    await node.append(name, PROMPT[:40])
    await node.node.create_checkpoint(name, "early", None)
    await node.append(name, PROMPT[40:])
    await node.idle(name)
    await node.node.pause(name, None)
    pin, refusals = node.catalog.pin, iter([NotFoundError("manifest")])

    async def refuse_once(wanted: Pin) -> None:
        for refusal in refusals:
            raise refusal
        await pin(wanted)

    monkeypatch.setattr(node.catalog, "pin", refuse_once)
    result = await node.node.resume(name, None)
    assert (result.restored_tokens, result.replayed_tokens, result.exact) == (32, 51, True)


async def test_a_session_makes_its_own_checkpoint_of_a_state_that_only_a_stranger_has(site: Site) -> None:
    """Equal prefixes share states. What a stranger has may be dropped by its own retention at any time."""
    node = await site.node(options=EAGER)
    await node.workflow()
    stranger = await node.session("stranger", policy=NONE)
    await node.append(stranger, PROMPT)
    await node.node.create_checkpoint(stranger, "c", None)
    name = await node.session("s", policy=NONE)
    await node.append(name, PROMPT)
    await node.idle(name)
    await node.node.pause(name, None)
    await node.node.resume(name, None)
    await node.node.pause(name, None)
    assert await grids(node, name) == [80]
    await node.node.delete_checkpoint(stranger, "c", None)
    await collect(node)
    assert (await node.node.resume(name, None)).restored_tokens == 80


async def test_a_checkpoint_expires(site: Site) -> None:
    node = await site.node(options=EAGER)
    await node.workflow()
    name = await node.session("s", policy=NONE)
    await node.append(name, PROMPT)
    now = (await node.catalog.get_session(name)).update_us
    await node.node.create_checkpoint(name, "soon", None, now + 1)
    await node.append(name, PROMPT)
    await node.node.create_checkpoint(name, "late", None, now + 10**12)
    report = await collect(node)
    assert report.checkpoints_dropped == {Drop.EXPIRED: 1}
    assert [view.row.checkpoint for view in await node.node.list_checkpoints(name)] == ["late"]
