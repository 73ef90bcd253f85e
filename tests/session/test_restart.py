"""Nodes die and leave; sessions go on."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from forkpoint.errors import NodeDrainingError, SessionRelocatingError, StoreUnavailableError, UnavailableError
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session import lease
from forkpoint.server.session.api import AppendCall, GenerateCall, Input
from forkpoint.statestore.blobs import Buffer
from forkpoint.statestore.calls import StepCommit
from forkpoint.statestore.records import SessionState
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import FAST, PATIENCE_SECONDS, Running, Site, background, key, until

PROMPT = list(b"what was said is said, whoever says it")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


async def test_a_generation_goes_on_without_its_client_after_a_crash(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    first.engine.step_pause = 0.002
    name = await first.session("s")
    await first.append(name, PROMPT)
    read, task = first.reading(GenerateCall(name, key("g"), max_tokens=100))
    await until(lambda: len(read.tokens) >= 20)
    await first.crash()
    with pytest.raises(UnavailableError):
        await task
    second = await site.node()
    await until(lambda: second.node.counters.generations_finished == 1)
    expected = continuation(PROMPT, 100, GREEDY)[0]
    assert await second.log(name) == PROMPT + expected
    assert second.node.counters.recovered_generations == 1
    nodes = await second.node.list_nodes()
    assert [node.row.incarnation for node in nodes] == [second.node.incarnation], "the dead one's row is gone"


async def get_on(node: Running, names: list[SessionName]) -> None:
    """Wait until every session has a token more than when its last owner was lost."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        for name in names:
            while (row := await node.catalog.get_session(name)).takeovers and row.head == row.takeover_head:
                await asyncio.sleep(0.005)


async def test_crashes_at_random_moments_lose_and_invent_nothing(site: Site, rng: random.Random) -> None:
    """What any reader saw is in the log, and the whole equals an undisturbed run (sampled, with a seed)."""
    node = await site.node()
    await node.workflow()
    sample = Sample(0.9, 0, 1.0, 0.0, -3)
    names = [await node.session(f"s{n}", seed=-3) for n in range(3)]
    for number, name in enumerate(names):
        await node.append(name, [*PROMPT, number])
    seen: list[list[int]] = [[] for _ in names]
    calls = [GenerateCall(name, key(f"g-{name.session}"), max_tokens=150, temperature=0.9) for name in names]
    done = False
    crashes = 0
    while not done:
        node.engine.step_pause = 0.001
        readers = []
        for call, tokens in zip(calls, seen, strict=True):
            position = len(PROMPT) + 1 + len(tokens)
            readers.append(node.reading(replace(call, resume_position=position)))
        if crashes < 6:
            await asyncio.sleep(rng.uniform(0.02, 0.12))
            if crashes % 2:
                # A session that costs owner after owner without a token is put away.
                await get_on(node, names)
            await node.crash()
            crashes += 1
        results = await asyncio.gather(*(task for _, task in readers), return_exceptions=True)
        for (read, _), tokens in zip(readers, seen, strict=True):
            tokens += read.tokens
        assert all(result is None or isinstance(result, UnavailableError) for result in results), results
        done = all(result is None for result in results)
        if node not in site.nodes:
            node = await site.node()
    for number, (name, tokens) in enumerate(zip(names, seen, strict=True)):
        expected = continuation([*PROMPT, number], 150, sample)[0]
        assert tokens == expected
        assert await node.log(name) == [*PROMPT, number, *expected]


async def test_leaving_well_ends_streams_with_a_cursor_and_loses_nothing(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    first.engine.step_pause = 0.002
    names = [await first.session(f"s{n}") for n in range(4)]
    readers = []
    for name in names[:2]:
        await first.append(name, PROMPT)
        readers.append(first.reading(GenerateCall(name, key(f"g-{name.session}"), max_tokens=120)))
    await first.append(names[2], PROMPT)
    await until(lambda: all(len(read.tokens) > 40 for read, _ in readers))
    await first.stop()
    assert first.engine.sequences == {}
    cursors = []
    for read, task in readers:
        with pytest.raises(NodeDrainingError) as caught:
            await task
        assert caught.value.resume_position == read.position
        cursors.append(read)
    with pytest.raises(NodeDrainingError):
        await first.append(names[3], b"x")
    second = await site.node()
    assert [node.row.incarnation for node in await second.node.list_nodes()] == [second.node.incarnation]
    for name, read in zip(names[:2], cursors, strict=True):
        call = GenerateCall(name, key(f"g-{name.session}"), max_tokens=120, resume_position=read.position)
        rest = await second.generate(call)
        assert read.tokens + rest.tokens == continuation(PROMPT, 120, GREEDY)[0]
    assert second.node.counters.restored_tokens >= 2 * 64, "every live session was checkpointed"
    assert second.node.counters.replayed_tokens <= 2 * 17 + 2 * 120
    result = await second.node.resume(names[2], None)
    assert (result.restored_tokens, result.replayed_tokens) == (32, len(PROMPT) - 32)


async def test_the_second_session_of_a_process_is_found_after_its_shutdown(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    for text in (b"a" * 40, b"b" * 70):
        name = await first.session(f"s{text[0]}")
        await first.append(name, text)
        await first.idle(name)
    await first.stop()
    second = await site.node()
    result = await second.node.resume(name, None)
    assert (result.source, result.restored_tokens) == ("checkpoint", 64)
    read = await second.generate(GenerateCall(name, key("g"), max_tokens=20))
    assert read.tokens == continuation(b"b" * 70, 20, GREEDY)[0]


async def test_all_sessions_are_listed_and_usable_after_a_crash(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    logs = {}
    for number in range(10):
        name = await first.session(f"s{number}")
        logs[name] = [number] * (number * 9)
        await first.append(name, logs[name])
    await first.crash()
    second = await site.node()
    views = await second.node.list_sessions("w", None, 100, False)
    assert {view.row.name: view.row.head for view in views} == {name: len(log) for name, log in logs.items()}
    for name, log in logs.items():
        if log:
            read = await second.generate(GenerateCall(name, key(f"g-{name.session}"), max_tokens=3))
            assert read.tokens == continuation(log, 3, GREEDY)[0]


async def test_a_live_owner_keeps_its_session_and_its_address_is_given(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    name = await first.session("s")
    await first.append(name, PROMPT)
    second = await site.node()
    with pytest.raises(SessionRelocatingError) as caught:
        await second.append(name, b"x")
    assert (caught.value.owner, caught.value.address) == (first.options.node, first.options.address)
    for call in (second.node.pause, second.node.resume):
        with pytest.raises(SessionRelocatingError):
            await call(name, None)
    with pytest.raises(SessionRelocatingError):
        await second.node.delete_session(name, None)
    assert await second.log(name) == PROMPT, "reading needs no ownership"
    children = await second.fork(name, "child")
    read = await second.generate(GenerateCall(children[0], key("g"), max_tokens=9))
    assert read.tokens == continuation(PROMPT, 9, GREEDY)[0]
    await first.stop()
    await second.append(name, b"x")
    assert (await second.node.get_session(name)).node == second.options.node


async def test_without_a_lock_file_a_dead_owner_is_known_by_its_standing_counter(site: Site) -> None:
    first = await site.node(lock=False)
    await first.workflow()
    name = await first.session("s")
    await first.append(name, PROMPT)
    second = await site.node(lock=False)
    await asyncio.sleep(0.5)
    with pytest.raises(SessionRelocatingError):
        await second.append(name, b"x")
    await first.crash()
    async with asyncio.timeout(5):
        while True:
            try:
                await second.append(name, b"x")
                break
            except SessionRelocatingError:
                await asyncio.sleep(0.02)
    assert await second.log(name) == [*PROMPT, *b"x"]


async def test_an_owner_that_lost_its_session_commits_nothing_more(site: Site) -> None:
    """Another node takes the session as if this one were dead: the store refuses the old epoch."""
    first = await site.node()
    await first.workflow()
    first.engine.step_pause = 0.003
    name = await first.session("s")
    await first.append(name, PROMPT)
    read, task = first.reading(GenerateCall(name, key("g"), max_tokens=120))
    await until(lambda: len(read.tokens) > 10)
    row = (await first.node.get_session(name)).row
    taken = await first.catalog.acquire(name, "thief", row.epoch)
    with pytest.raises(SessionRelocatingError):
        await task
    log = await first.log(name)
    assert log[: len(PROMPT) + len(read.tokens)] == PROMPT + read.tokens
    assert len(log) == taken.head
    assert first.node.counters.stale_epochs == 1
    await until(lambda: first.engine.sequences == {})
    # The thief is no node: its session is free to take, and the stream goes on.
    rest = await first.generate(GenerateCall(name, key("g"), max_tokens=120, resume_position=read.position))
    assert read.tokens + rest.tokens == continuation(PROMPT, 120, GREEDY)[0]


async def test_a_token_sampled_before_the_session_was_lost_is_not_written_when_it_is_back(memory: Running) -> None:
    """A step runs while another owner writes three tokens and lets go, and this node takes the session back."""
    node, blobs = memory, memory.site.blobs
    name = await node.session("s")
    await node.append(name, PROMPT)
    expected = continuation(PROMPT, 40, GREEDY)[0]
    node.engine.step_pause = 0.01
    read, task = node.reading(GenerateCall(name, key("g"), max_tokens=40))
    await until(lambda: len(read.tokens) > 5)
    node.engine.step_pause = 0.1
    put = blobs.put
    stolen: list[str] = []

    async def steal(digest: str, *pieces: Buffer) -> bool:
        if not stolen:
            stolen.append(digest)
            row = await node.catalog.get_session(name)
            generation = await node.catalog.open_generation(name)
            assert generation is not None
            await node.catalog.acquire(name, "thief", row.epoch)
            at = row.head - len(PROMPT)
            tokens = tuple(expected[at : at + 3])
            await node.catalog.commit_step([StepCommit(name, row.epoch + 1, row.head, tokens, generation.generation)])
            await node.catalog.release(name, row.epoch + 1, SessionState.ACTIVE)
        return await put(digest, *pieces)

    blobs.put = steal  # type: ignore[method-assign]
    await node.node.create_checkpoint(name, "c", None)
    node.engine.step_pause = 0.0
    with pytest.raises(SessionRelocatingError):
        await task
    rest = await node.generate(GenerateCall(name, key("g"), max_tokens=40, resume_position=read.position))
    assert read.tokens + rest.tokens == expected
    assert await node.log(name) == PROMPT + expected
    assert node.node.counters.stale_epochs == 1


async def test_a_stale_owner_finds_out_at_its_next_append(site: Site) -> None:
    node = await site.node()
    await node.workflow()
    name = await node.session("s")
    await node.append(name, PROMPT)
    row = (await node.node.get_session(name)).row
    await node.catalog.acquire(name, "thief", row.epoch)
    await node.catalog.release(name, row.epoch + 1, SessionState.ACTIVE)
    done = await node.append(name, b"xy")
    assert done.outcome.epoch == row.epoch + 2
    assert await node.log(name) == [*PROMPT, *b"xy"]


async def test_a_request_id_is_known_to_the_next_owner(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    name = await first.session("s")
    done = await first.append(name, PROMPT, request="a")
    whole = await first.generate(GenerateCall(name, key("g"), max_tokens=10))
    await first.crash()
    second = await site.node()
    again = await second.append(name, PROMPT, request="a")
    assert again.outcome.replayed and again.outcome.head == done.outcome.head
    reread = await second.generate(GenerateCall(name, key("g"), max_tokens=10))
    assert (reread.tokens, reread.finished) == (whole.tokens, whole.finished)
    assert await second.log(name) == PROMPT + whole.tokens


async def test_a_long_step_does_not_look_like_death(site: Site) -> None:
    first = await site.node(HashEngine())
    await first.workflow()
    name = await first.session("s")
    first.engine.step_pause = 0.6
    await first.append(name, PROMPT)
    second = await site.node(lock=False)
    for _ in range(10):
        with pytest.raises(SessionRelocatingError):
            await second.node.append(AppendCall(name, Input(token_ids=(1,))))
        await asyncio.sleep(0.06)
    first.engine.step_pause = 0.0
    assert FAST.lease_ttl_seconds < 0.6


async def test_stopping_twice_and_stopping_an_idle_node_is_fine(site: Site) -> None:
    node = await site.node()
    await node.node.stop()
    await node.stop()


async def test_a_dead_nodes_row_goes_though_it_owned_idle_sessions_which_stay_usable(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    name = await first.session("idle")
    await first.append(name, PROMPT)
    second = await site.node()
    await first.crash()
    async with asyncio.timeout(5):
        while len(await second.node.list_nodes()) > 1:
            await asyncio.sleep(0.01)
    assert second.node.counters.recovered_generations == 0
    read = await second.generate(GenerateCall(name, key("g"), max_tokens=5))
    assert read.tokens == continuation(PROMPT, 5, GREEDY)[0]


@pytest.mark.parametrize("leave", ["stop", "crash"])
async def test_a_takeover_that_the_store_refused_is_tried_again(site: Site, leave: str) -> None:
    first = await site.node()
    await first.workflow()
    first.engine.step_pause = 0.003
    name = await first.session("s")
    await first.append(name, PROMPT)
    read, task = first.reading(GenerateCall(name, key("g"), max_tokens=100))
    second = await site.node()
    await until(lambda: len(read.tokens) > 3)
    second.faults.before["acquire"] = StoreUnavailableError("catalog", "gone")
    await (first.stop() if leave == "stop" else first.crash())
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0.1)
    second.faults.heal()
    await until(lambda: second.node.counters.generations_finished == 1)
    assert await second.log(name) == PROMPT + continuation(PROMPT, 100, GREEDY)[0]


async def test_recovery_outlives_what_nobody_foresaw(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await site.node()
    await first.workflow()
    first.engine.step_pause = 0.003
    name = await first.session("s")
    await first.append(name, PROMPT)
    read, task = first.reading(GenerateCall(name, key("g"), max_tokens=60))
    second = await site.node()
    await until(lambda: len(read.tokens) > 3)

    def no_locks(path: Path) -> bool:
        raise OSError(37, "No locks available")

    with monkeypatch.context() as patch:
        patch.setattr(lease, "lock_is_free", no_locks)
        await asyncio.sleep(0.1)
    await first.crash()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: second.node.counters.generations_finished == 1)


async def test_a_session_that_arrives_while_the_node_leaves_is_given_up_as_well(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    old, new = await first.session("old"), await first.session("new")
    await first.append(old, PROMPT)
    first.faults.gates = {"acquire": asyncio.Event(), "release": asyncio.Event()}
    appending = background(first.append(new, b"x"))
    await until(lambda: "acquire" in first.faults.waiting)
    stopping = background(first.node.stop())
    await until(lambda: "release" in first.faults.waiting)
    first.faults.gates["acquire"].set()
    await asyncio.sleep(0.05)
    first.faults.gates["release"].set()
    await stopping
    with pytest.raises(NodeDrainingError):
        await appending
    for name in (old, new):
        assert (await first.catalog.get_session(name)).owner == ""
    second = await site.node()
    await second.append(new, b"y")
    assert await second.log(new) == list(b"y")
