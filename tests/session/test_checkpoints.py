"""Checkpoints: when, what they hold, and what a damaged one costs."""

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from forkpoint.errors import NotFoundError, SessionPausedError, StoreFullError
from forkpoint.ids import SessionName
from forkpoint.limits import TILE_TOKENS
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import GenerateCall
from forkpoint.statestore.blobs import Buffer
from forkpoint.statestore.records import CheckpointPolicy
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import FAST, Read, Running, Site, background, key, until

PROMPT = list(bytes(range(97, 117))) * 4
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


async def grids(node: Running, name: object) -> list[int]:
    return [view.row.grid_position for view in await node.node.list_checkpoints(name)]  # type: ignore[arg-type]


async def written(node: Running, expected: list[int]) -> list[int]:
    """`expected`, when so many captures were taken, and less what a newer capture overtook."""
    counters = node.node.counters
    await until(lambda: counters.checkpoints_written + counters.checkpoints_skipped == len(expected))
    assert counters.checkpoints_skipped == 0
    return expected


async def filled(node: Running, name: SessionName, log: list[int], step: int) -> None:
    """Append piece by piece, so that every checkpoint is written before the next one is captured."""
    for start in range(0, len(log), step):
        before = node.node.counters.checkpoints_written
        await node.append(name, log[start : start + step])
        await node.idle(name)
        if len(log) - start >= step:
            await until(lambda before=before: node.node.counters.checkpoints_written > before)  # type: ignore[misc]


async def test_the_cadence_is_kept_by_prefill_and_decode_alike(node: Running) -> None:
    """One at a time: what is due while the one before is still being written waits for the cadence after it."""
    name = await node.session("s", policy=CheckpointPolicy(48))
    for number in range(9):
        if number < 4:
            await node.append(name, PROMPT[:40])
        else:
            await node.generate(GenerateCall(name, key(f"g{number}"), max_tokens=20))
        due = (await node.node.get_session(name)).row.head // 48
        await until(lambda due=due: node.node.counters.checkpoints_written == due)  # type: ignore[misc]
    await node.idle(name)
    assert await grids(node, name) == await written(node, [48, 96, 144, 192, 240])


async def test_an_interval_off_the_grid_gives_the_grid_points_below(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(50))
    await filled(node, name, PROMPT * 2, 50)
    assert await grids(node, name) == await written(node, [48, 96, 144])


async def test_no_cadence_and_no_turn_end_mean_no_checkpoints(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(0))
    await node.append(name, PROMPT * 2)
    await node.generate(GenerateCall(name, key("g"), max_tokens=60))
    await node.idle(name)
    assert node.engine.captures == 0


async def test_the_end_of_a_turn_is_a_checkpoint_when_the_policy_says_so(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(0, on_turn_end=True))
    await node.append(name, PROMPT)
    await node.generate(GenerateCall(name, key("g"), max_tokens=40))
    await until(lambda: node.node.counters.checkpoints_written == 1)
    assert await grids(node, name) == [112]


async def test_a_checkpoint_on_request_pins_the_head_and_holds_the_grid_point_below(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(0))
    await node.append(name, [*PROMPT, 1, 2, 3])
    view = await node.node.create_checkpoint(name, "mine", key("c"))
    assert (view.row.position, view.row.grid_position, view.row.checkpoint) == (83, 80, "mine")
    assert [part.name for part in view.parts] == ["kda.000.state.0", "mla.page.000000", "mla.page.000001"]
    assert view.bytes_stored > 0 and view.numerics_ids == ("hash-1",)
    again = await node.node.create_checkpoint(name, "mine", key("c"))
    assert (again.row, again.parts) == (view.row, view.parts)
    assert [check.problem async for check in node.node.verify_checkpoint(name, "mine")] == ["", "", ""]
    with pytest.raises(NotFoundError):
        await node.node.get_checkpoint(name, "other")
    # The same state again costs nothing.
    await node.node.create_checkpoint(name, "twin", None)
    assert (await node.node.get_checkpoint(name, "twin")).parts == view.parts


async def test_a_checkpoint_during_a_generation_disturbs_nothing(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(0))
    node.engine.step_pause = 0.001
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g"), max_tokens=120))
    for _ in range(5):
        before = len(PROMPT) + len(read.tokens)
        view = await node.node.create_checkpoint(name, "", None)
        assert before <= view.row.position
        assert view.row.grid_position > view.row.position - 2 * TILE_TOKENS
    await task
    assert read.tokens == continuation(PROMPT, 120, GREEDY)[0]


async def test_equal_tokens_give_equal_parts_however_they_came_about(site: Site) -> None:
    """One session takes turns, is forked, parked and resumed; the other gets all tokens in one append."""
    first = await site.node()
    await first.workflow()
    name = await first.session("s")
    await first.append(name, PROMPT)
    await first.generate(GenerateCall(name, key("g"), max_tokens=37))
    child = (await first.fork(name, "child"))[0]
    await first.append(child, [5] * 33)
    await first.node.pause(child, None)
    await first.node.resume(child, None)
    await first.generate(GenerateCall(child, key("h"), max_tokens=19))
    one = await first.node.create_checkpoint(child, "c", None)
    log = await first.log(child)
    second = await site.node()
    other = await second.session("other")
    await second.append(other, log)
    two = await second.node.create_checkpoint(other, "c", None)
    assert (one.parts, one.row.chain_hash) == (two.parts, two.row.chain_hash)
    assert two.bytes_stored == 0, "all parts were there"


async def test_a_checkpoint_of_an_empty_session_can_be_taken_and_resumed(node: Running) -> None:
    name = await node.session("s")
    view = await node.node.create_checkpoint(name, "c", None)
    assert (view.row.position, view.row.grid_position) == (0, 0)
    await node.node.pause(name, None)
    with pytest.raises(SessionPausedError):
        await node.node.create_checkpoint(name, "d", None)
    assert len(await node.node.list_checkpoints(name)) == 1
    result = await node.node.resume(name, None)
    assert (result.restored_tokens, result.replayed_tokens, result.exact) == (0, 0, True)
    await node.append(name, PROMPT)
    read = await node.generate(GenerateCall(name, key("g"), max_tokens=5))
    assert read.tokens == continuation(PROMPT, 5, GREEDY)[0]


def blob_path(site: Site, digest: str) -> Path:
    return next(path for path in (site.folder / "blobs").rglob("*") if path.is_file() and digest in str(path))


@pytest.mark.parametrize(("damage", "bad"), [("flip", 1), ("cut", 2), ("gone", 1), ("flip", 99), ("gone", 99)])
async def test_damaged_checkpoints_cost_time_and_nothing_else(disk: Site, damage: str, bad: int) -> None:
    site = disk
    first = await site.node()
    await first.workflow()
    name = await first.session("s", policy=CheckpointPolicy(32))
    await filled(first, name, PROMPT * 2, 32)
    await first.generate(GenerateCall(name, key("g"), max_tokens=10))
    await first.idle(name)
    await first.crash()
    probe = await site.node()
    views = await probe.node.list_checkpoints(name)
    await probe.stop()
    broken = 0
    for view in list(reversed(views))[:bad]:
        path = blob_path(site, view.parts[0].blake3)
        data = bytearray(path.read_bytes())
        path.chmod(0o644)
        if damage == "flip":
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif damage == "cut":
            path.write_bytes(data[:-1])
        else:
            path.unlink()
        broken += 1
    second = await site.node()
    result = await second.node.resume(name, None)
    assert second.node.counters.fallback_restores == broken
    assert result.restored_tokens == (0 if bad == 99 else views[-1 - bad].row.grid_position)
    assert result.restored_tokens + result.replayed_tokens == 170
    read = await second.generate(GenerateCall(name, key("h"), max_tokens=25))
    assert read.tokens == continuation(PROMPT * 2, 35, GREEDY)[0][10:]
    if bad == 1:
        await until(lambda: second.node.counters.checkpoints_written > 0)
        await second.stop()
        third = await site.node()
        healed = await third.node.resume(name, None)
        assert (healed.restored_tokens, third.node.counters.fallback_restores) == (192, 0)
        await third.node.rewind(name, 165, None)
        assert (await third.node.resume(name, None)).restored_tokens == 160, "replay wrote the damaged one anew"


async def test_checkpoints_that_cannot_be_written_never_stop_a_generation(site: Site) -> None:
    node = await site.node()
    await node.workflow()
    name = await node.session("s", policy=CheckpointPolicy(16))
    node.faults.before["put_checkpoint"] = StoreFullError("catalog", "no space left on device")
    await node.append(name, PROMPT)
    read = await node.generate(GenerateCall(name, key("g"), max_tokens=40))
    assert read.tokens == continuation(PROMPT, 40, GREEDY)[0]
    await until(lambda: node.node.counters.checkpoints_failed > 0)
    with pytest.raises(StoreFullError):
        await node.node.create_checkpoint(name, "c", key("c"))
    node.faults.heal()
    view = await node.node.create_checkpoint(name, "c", key("c"))
    assert view.row.grid_position == 112
    await node.node.pause(name, None)
    assert (await node.node.resume(name, None)).restored_tokens == 112


async def test_one_write_is_in_flight_and_the_newest_capture_waits(site: Site) -> None:
    node = await site.node()
    await node.workflow()
    gate = asyncio.Event()
    put = site.blobs.put

    async def slow(digest: str, *pieces: Buffer) -> bool:
        await gate.wait()
        return await put(digest, *pieces)

    site.blobs.put = slow  # type: ignore[method-assign]
    name = await node.session("s", policy=CheckpointPolicy(16))
    await node.append(name, PROMPT)
    read = await node.generate(GenerateCall(name, key("g"), max_tokens=60))
    assert read.finished is not None, "decoding does not wait for the store"
    await node.idle(name)
    gate.set()
    await until(lambda: node.node.counters.checkpoints_written == 2)
    written = await grids(node, name)
    assert written == [16, 128]
    assert node.node.counters.checkpoints_skipped == 6


async def test_state_of_other_numerics_is_replayed_when_short_and_marked_when_not(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    name = await first.session("s")
    await filled(first, name, PROMPT * 2, 32)
    await first.stop()
    second = await site.node(HashEngine(numerics_id="hash-2"))
    result = await second.node.resume(name, None)
    assert (result.source, result.restored_tokens, result.exact) == ("empty", 0, True)
    row = (await second.node.get_session(name)).row
    assert (row.exact, row.numerics_ids) == (True, ("hash-1", "hash-2"))
    await second.stop()
    third = await site.node(HashEngine(numerics_id="hash-3"), options=replace(FAST, replay_limit_tokens=50))
    result = await third.node.resume(name, None)
    assert (result.source, result.exact) == ("checkpoint", False)
    assert result.restored_tokens == 128
    row = (await third.node.get_session(name)).row
    assert (row.exact, row.numerics_ids) == (False, ("hash-1", "hash-2", "hash-3"))
    view = await third.node.create_checkpoint(name, "c", None)
    assert view.numerics_ids[0] == "hash-3" and len(view.numerics_ids) == 2
    assert third.node.counters.inexact_restores == 1


async def left_at_a_grid_point(site: Site) -> tuple[Running, SessionName]:
    """A node that has not touched the session yet, whose newest checkpoint is at its head of 64 tokens."""
    first = await site.node()
    await first.workflow()
    name = await first.session("s")
    await filled(first, name, [3] * 64, 32)
    await first.stop()
    second = await site.node()
    return second, name


async def test_a_sample_after_a_restore_exactly_at_the_head_restores_below_it(site: Site) -> None:
    second, name = await left_at_a_grid_point(site)
    view = await second.node.create_checkpoint(name, "c", None)
    assert view.row.grid_position == 64
    assert second.node.counters.replayed_tokens == 0, "the checkpoint at the head served"
    read = await second.generate(GenerateCall(name, key("g"), max_tokens=20))
    assert read.tokens == continuation([3] * 64, 20, GREEDY)[0]
    assert second.node.counters.restores == 2


async def test_a_generation_that_begins_while_a_step_is_planned_waits_for_its_row(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    second, name = await left_at_a_grid_point(site)
    await second.node.create_checkpoint(name, "c", None)  # restored exactly at the head
    residents, reads = second.node._loop._residents, list["asyncio.Task[Read]"]()
    admit = residents.admit

    async def meanwhile() -> None:
        await admit()
        if not reads:
            reads.append(background(second.generate(GenerateCall(name, key("g"), max_tokens=20))))
            await until(lambda: second.node._core.lives[name].generation is not None)

    monkeypatch.setattr(residents, "admit", meanwhile)
    second.node._core.wake()
    await until(lambda: bool(reads))
    assert (await reads[0]).tokens == continuation([3] * 64, 20, GREEDY)[0]
    assert second.node.counters.session_failures == 0


async def test_a_manifest_of_another_state_is_passed_over(node: Running) -> None:
    """The store holds it under this log's hash, which a bug of a store could do: its own words count."""
    ours, other = [await node.session(name, policy=CheckpointPolicy(0)) for name in ("ours", "other")]
    log = [*PROMPT, 1, 2, 3]
    await node.append(ours, log)
    await node.append(other, log[::-1])
    for name in (ours, other):
        await node.idle(name)
    await node.node.create_checkpoint(other, "c", None)
    row, manifest = await node.catalog.get_checkpoint(other, "c")
    await node.node.pause(ours, None)
    (own,) = await node.catalog.list_checkpoints(ours)
    wrong = replace(row, session=ours, chain_hash=own.chain_hash)
    epoch = (await node.node.get_session(ours)).row.epoch
    await node.catalog.put_checkpoint(wrong, manifest, epoch, replace_manifest=True)
    assert (await node.node.resume(ours, None)).restored_tokens == 0
    assert node.node.counters.fallback_restores == 1
    read = await node.generate(GenerateCall(ours, key("g"), max_tokens=9))
    assert read.tokens == continuation(log, 9, GREEDY)[0]
    await node.node.pause(ours, None)
    assert (await node.node.resume(ours, None)).restored_tokens == 80, "the next checkpoint of the state healed it"
