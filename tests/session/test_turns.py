"""Whole lives of sessions: branches between turns, interruptions at every moment, thousands that come and go."""

import asyncio
import itertools
import random
from dataclasses import replace

import pytest

from forkpoint.errors import ContextFullError, SessionBusyError, StoreUnavailableError
from forkpoint.ids import SessionName
from forkpoint.parts import PartSpec
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import CreateSession, ForkCall, GenerateCall, Input
from forkpoint.statestore.blobs import Buffer
from forkpoint.statestore.records import CheckpointPolicy, FinishReason
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import FAST, Running, Site, background, key, until

PROMPT = list(b"a man walks into a bar and")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)
INTERVAL = 32


async def test_a_branch_at_any_earlier_turn_replays_less_than_one_interval(disk: Site) -> None:
    """Eight turns, then another node; checkpoints lie along the way, not only at the end."""
    first = await disk.node()
    await first.workflow()
    name = await first.session("s", policy=CheckpointPolicy(INTERVAL))
    first.engine.step_pause = 0.003
    borders, log = [], list[int]()
    for turn in range(8):
        borders.append(len(log))
        read = await first.generate(
            GenerateCall(name, key(f"g{turn}"), Input(token_ids=(*PROMPT, turn)), max_tokens=15 + 7 * turn)
        )
        log += [*PROMPT, turn, *read.tokens]
    await first.stop()
    second = await disk.node()
    for turn, border in enumerate(borders):
        child = (await second.fork(name, f"turn{turn}", position=border))[0]
        result = await second.node.resume(child, None)
        assert result.restored_tokens + result.replayed_tokens == border
        assert result.replayed_tokens < INTERVAL + 16, f"turn {turn} at {border} replays {result.replayed_tokens}"
        read = await second.generate(GenerateCall(child, key(f"h{turn}"), Input(token_ids=(1, 2)), max_tokens=9))
        assert read.tokens == continuation([*log[:border], 1, 2], 9, GREEDY)[0]


async def test_a_second_restore_finds_what_the_first_one_found(site: Site) -> None:
    node = await site.node()
    await node.workflow()
    name = await node.session("s", policy=CheckpointPolicy(48))
    await node.append(name, PROMPT * 7)
    await node.idle(name)
    results = []
    for _ in range(3):
        await node.node.pause(name, None)
        results.append(await node.node.resume(name, None))
    assert {(r.restored_tokens, r.replayed_tokens, r.source) for r in results} == {(176, 6, "checkpoint")}


async def test_a_transient_session_has_no_checkpoints_by_count_or_turn(node: Running) -> None:
    policy = CheckpointPolicy(16, on_turn_end=True)
    parent = await node.session("s", policy=policy)
    await node.append(parent, PROMPT[:5])
    await node.idle(parent)
    call = CreateSession(SessionName("w", "t"), 7, policy, transient=True)
    fork = ForkCall(parent, 1, None, ("child",), transient=True)
    for view in (await node.node.create_session(call), (await node.node.fork(fork))[0][0]):
        name = view.row.name
        await node.append(name, PROMPT * 3)
        await node.generate(GenerateCall(name, key(f"g-{name}"), max_tokens=40))
        await node.idle(name)
        assert node.engine.captures == 0 and await node.node.list_checkpoints(name) == []
    # What leaves the engine is kept all the same: a pause is no loss.
    await node.node.pause(name, None)
    assert (await node.node.resume(name, None)).restored_tokens == 112


@pytest.mark.parametrize("who", ["blob store", "engine"])
async def test_a_load_that_fails_half_way_is_an_error_and_never_a_loaded_state(site: Site, who: str) -> None:
    # Logs that are short enough are replayed when the blobs do not answer: see test_silent_blobs.
    node = await site.node(options=replace(FAST, replay_limit_tokens=0))
    await node.workflow()
    name = await node.session("s", policy=CheckpointPolicy(48))
    await node.append(name, PROMPT * 7)
    await node.idle(name)
    await node.node.pause(name, None)
    calls, get, load = itertools.count(1), site.blobs.get, node.engine.load_part
    broken = [True]

    async def bad_get(digest: str) -> bytes:
        if broken[0] and next(calls) > 1:
            raise StoreUnavailableError("blobs", "input/output error")
        return await get(digest)

    def bad_load(sequence: int, spec: PartSpec, data: Buffer) -> None:
        if broken[0] and next(calls) > 1:
            raise RuntimeError("an illegal memory access was encountered")
        load(sequence, spec, data)

    if who == "engine":
        node.engine.load_part = bad_load  # type: ignore[method-assign]
    else:
        site.blobs.get = bad_get  # type: ignore[method-assign]
    with pytest.raises((StoreUnavailableError, RuntimeError)):
        await node.node.resume(name, None)
    assert next(calls) > 2 and (await node.node.get_session(name)).consumed == 0
    broken[0] = False
    assert (await node.node.resume(name, None)).restored_tokens == 176
    read = await node.generate(GenerateCall(name, key("g"), max_tokens=20))
    assert read.tokens == continuation(PROMPT * 7, 20, GREEDY)[0]


async def interrupt(node: Running, name: SessionName, how: str, delay: float) -> None:
    """Something that ends or disturbs a turn, after a while."""
    await asyncio.sleep(delay)
    match how:
        case "cancel twice":
            await asyncio.gather(node.node.cancel_generation(name), node.node.cancel_generation(name))
        case "pause":
            await node.node.pause(name, None)
            await node.node.resume(name, None)
        case "checkpoint and cancel":
            saving = background(node.node.create_checkpoint(name, "", None))
            await node.node.cancel_generation(name)
            await saving
        case "too long":
            with pytest.raises((ContextFullError, SessionBusyError)):
                await node.append(name, [1] * 5000)
            await node.node.cancel_generation(name)


@pytest.mark.parametrize("how", ["cancel twice", "pause", "checkpoint and cancel", "too long"])
async def test_a_turn_that_is_cut_short_at_any_moment_leaves_the_session_at_its_last_token(
    memory: Running, how: str
) -> None:
    """Moments: while it waits, restores, prefills, decodes, writes a checkpoint, and when it is over."""
    node, put = memory, memory.site.blobs.put

    async def slow(digest: str, *pieces: Buffer) -> bool:
        await asyncio.sleep(0.002)
        return await put(digest, *pieces)

    memory.site.blobs.put = slow  # type: ignore[method-assign]
    name, log = await node.session("s", policy=CheckpointPolicy(16)), list[int]()
    node.engine.step_pause = 0.001
    reasons = set()
    for turn in range(16):
        if turn % 4 == 3:
            await node.node.pause(name, None)
            await node.node.resume(name, None)
        read, task = node.reading(GenerateCall(name, key(f"g{turn}"), Input(token_ids=(*PROMPT, turn)), max_tokens=24))
        await until(lambda read=read: read.started is not None)  # type: ignore[misc]
        if turn == 15:
            # The machine may be slow: this one comes to its end.
            await until(lambda task=task: task.done())  # type: ignore[misc]
        await interrupt(node, name, how, 0.008 * turn)
        async with asyncio.timeout(10):
            await asyncio.gather(task, return_exceptions=True)
        again = await node.generate(
            GenerateCall(name, key(f"g{turn}"), Input(token_ids=(*PROMPT, turn)), max_tokens=24)
        )
        log += [*PROMPT, turn]
        assert again.tokens == continuation(log, 24, GREEDY)[0][: len(again.tokens)]
        assert again.tokens[: len(read.tokens)] == read.tokens
        log += again.tokens
        assert await node.log(name) == log
        reasons.add(again.reason)
    assert FinishReason.LENGTH in reasons and len(reasons) == 2, reasons


async def test_a_thousand_sessions_opened_used_cut_short_and_closed_leave_nothing(site: Site) -> None:
    """On eight slots, four clients at a time; whatever they do, the engine and the node end empty."""
    node = await site.node(HashEngine(slots=8, pages=64))
    await node.workflow()
    rng = random.Random(7)
    count = 1000 if site.backend == "memory" else 60
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            name = await node.session(f"s{number}")
            call = GenerateCall(
                name,
                key(f"g{number}"),
                Input(token_ids=tuple(PROMPT)),
                max_tokens=rng.randrange(1, 12),
                cancel_on_disconnect=rng.random() < 0.5,
            )
            match rng.randrange(4):
                case 0:
                    await node.generate(call)
                case 1:
                    events = node.node.generate(call)
                    await anext(events)
                    await events.aclose()  # type: ignore[attr-defined]
                case 2:
                    _, task = node.reading(call)
                    await asyncio.sleep(0)
                    await node.node.cancel_generation(name)
                    await asyncio.gather(task, return_exceptions=True)
                case _:
                    await node.append(name, PROMPT)
                    await node.fork(name, f"c{number}")
                    await node.node.delete_session(SessionName("w", f"c{number}"), None)
            if rng.random() < 0.2:
                await node.node.pause(name, None)
            await node.node.delete_session(name, None)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(4):
            group.create_task(client())
    await until(lambda: node.engine.sequences == {})
    assert await node.node.list_sessions(None, None, 10, False) == []
