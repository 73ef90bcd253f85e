"""Pause and resume, here and on another node."""

import asyncio
import contextlib

import pytest

from forkpoint.errors import (
    NodeDrainingError,
    NotFoundError,
    PreconditionError,
    RequestIdReusedError,
    SessionPausedError,
    StoreUnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import GenerateCall
from forkpoint.statestore.records import CheckpointPolicy, FinishReason
from tests.support.hash_engine import continuation
from tests.support.session_site import Running, Site, background, key, until

PROMPT = list(b"hold this thought for a while, please")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


async def test_pause_ends_the_generation_frees_the_slot_and_refuses_writers(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(0))
    node.engine.step_pause = 0.002
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g")))
    await until(lambda: len(read.tokens) > 10)
    view = await node.node.pause(name, key("p"))
    await task
    assert (view.state, view.node, read.reason) == ("PAUSED", "", FinishReason.PAUSED)
    assert node.engine.sequences == {}
    with pytest.raises(SessionPausedError):
        await node.append(name, b"x")
    with pytest.raises(SessionPausedError):
        await node.generate(GenerateCall(name, key("h")))
    with pytest.raises(SessionPausedError):
        await node.node.rewind(name, 3, None)
    assert (await node.node.pause(name, key("p"))).state == "PAUSED"
    assert await node.log(name) == PROMPT + read.tokens
    assert len(await node.node.list_checkpoints(name)) == 1
    child = (await node.fork(name, "child"))[0]
    assert (await node.generate(GenerateCall(child, key("c"), max_tokens=4))).tokens
    again = await node.generate(GenerateCall(name, key("g")))
    assert (again.tokens, again.reason) == (read.tokens, FinishReason.PAUSED), "stored results stay readable"
    assert (await node.node.cancel_generation(name)).state == "PAUSED"


async def test_resume_restores_less_than_it_would_replay(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(0))
    await node.append(name, PROMPT * 4)
    await node.idle(name)
    await node.node.pause(name, None)
    result = await node.node.resume(name, None)
    assert (result.restored_tokens, result.replayed_tokens) == (144, len(PROMPT) * 4 - 144)
    assert result.restored_bytes > 0 and result.exact and result.source == "checkpoint"
    assert (result.view.state, result.view.consumed) == ("ACTIVE", len(PROMPT) * 4)
    again = await node.node.resume(name, None)
    assert (again.source, again.restored_tokens) == ("resident", 0)
    read = await node.generate(GenerateCall(name, key("g"), max_tokens=30))
    assert read.tokens == continuation(PROMPT * 4, 30, GREEDY)[0]


async def test_a_session_moves_to_another_node_by_pause_and_resume(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    second = await site.node()
    name = await first.session("s")
    log = list(PROMPT)
    await first.append(name, PROMPT)
    source, target = first, second
    for turn in range(6):
        read = await source.generate(GenerateCall(name, key(f"g{turn}"), max_tokens=15 + turn))
        assert read.tokens == continuation(log, 15 + turn, GREEDY)[0]
        log += read.tokens
        await source.node.pause(name, None)
        result = await target.node.resume(name, None)
        assert result.restored_tokens >= (len(log) - 17) // 16 * 16
        assert result.view.node == target.options.node
        source, target = target, source
    assert await second.log(name) == log


async def test_pausing_a_session_that_nobody_runs_needs_no_restore(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    name = await first.session("s")
    await first.append(name, PROMPT)
    await first.crash()
    second = await site.node()
    assert (await second.node.pause(name, None)).state == "PAUSED"
    assert second.node.counters.restores == 0


async def test_resume_of_an_unknown_or_deleted_session_disturbs_no_other(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.idle(name)
    with pytest.raises(NotFoundError):
        await node.node.resume(SessionName("w", "ghost"), None)
    gone = await node.session("gone")
    await node.node.delete_session(gone, None)
    with pytest.raises(NotFoundError):
        await node.node.resume(gone, None)
    with pytest.raises(NotFoundError):
        await node.node.pause(gone, None)
    assert len(node.engine.sequences) == 1
    back = await node.node.undelete_session(gone)
    assert back.state == "PAUSED"
    await node.node.resume(gone, None)
    with pytest.raises(PreconditionError):
        await node.node.undelete_session(gone)


async def test_pause_resume_and_delete_at_the_same_time_end_in_one_of_their_orders(site: Site) -> None:
    node = await site.node()
    await node.workflow()
    for number in range(8):
        name = await node.session(f"s{number}")
        node.engine.step_pause = 0.001
        await node.append(name, PROMPT)
        _, task = node.reading(GenerateCall(name, key(f"g{number}"), max_tokens=50))
        await asyncio.sleep(0.002 * number)
        async with asyncio.timeout(10):
            await asyncio.gather(
                node.node.pause(name, None),
                node.node.resume(name, None),
                node.node.cancel_generation(name),
                node.node.delete_session(name, None),
                node.node.create_checkpoint(name, "", None),
                task,
                return_exceptions=True,
            )
            if (await node.node.get_session(name)).state != "DELETED":
                await node.node.delete_session(name, None)
    await until(lambda: node.engine.sequences == {})


async def test_cancel_and_delete_do_not_wait_for_a_restore(memory: Running) -> None:
    node, blobs = memory, memory.site.blobs
    gate, get = asyncio.Event(), blobs.get

    async def slow(digest: str) -> bytes:
        await gate.wait()
        return await get(digest)

    names = [await node.session(f"s{number}") for number in range(2)]
    for name in names:
        await node.append(name, [*PROMPT, *name.session.encode()])
        await node.idle(name)
        await node.node.pause(name, None)
    blobs.get = slow  # type: ignore[method-assign]
    resumes = [background(node.node.resume(name, None)) for name in names]
    await until(lambda: len(node.engine.sequences) == 2)
    assert (await node.node.get_session(names[0])).state == "RESTORING"
    read, task = node.reading(GenerateCall(names[0], key("g"), max_tokens=9))
    await until(lambda: read.started is not None)
    async with asyncio.timeout(5):
        await node.node.cancel_generation(names[0])
        await task
        await node.node.delete_session(names[1], None)
    assert (read.reason, read.tokens) == (FinishReason.CANCELLED, [])
    gate.set()
    assert (await resumes[0]).restored_tokens == 32
    with pytest.raises(NotFoundError):
        await resumes[1]
    await until(lambda: len(node.engine.sequences) == 1)
    again = await node.generate(GenerateCall(names[0], key("h"), max_tokens=9))
    assert again.tokens == continuation([*PROMPT, *b"s0"], 9, GREEDY)[0]


async def test_deleting_frees_everything(node: Running) -> None:
    name = await node.session("s")
    node.engine.step_pause = 0.002
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g")))
    await until(lambda: len(read.tokens) > 3)
    view = await node.node.delete_session(name, key("d"))
    await asyncio.gather(task, return_exceptions=True)
    assert view.state == "DELETED" and node.engine.sequences == {}
    assert (await node.node.delete_session(name, key("d"))).state == "DELETED"
    with pytest.raises(NotFoundError):
        await node.append(name, b"x")
    with pytest.raises(NotFoundError):
        await node.log(name)
    assert (await node.node.get_session(name)).state == "DELETED"


async def test_a_pause_that_is_sent_again_after_a_resume_pauses_nothing(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    assert (await node.node.pause(name, key("p"))).state == "PAUSED"
    await node.node.resume(name, key("r"))
    assert (await node.node.pause(name, key("p"))).state == "ACTIVE", "the first call's answer was lost on its way"
    with pytest.raises(RequestIdReusedError):
        await node.node.pause(name, key("p", "another session's"))
    assert (await node.node.pause(name, key("p2"))).state == "PAUSED"


async def test_a_session_that_arrives_while_it_is_deleted_does_not_stay(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.node.pause(name, None)
    node.faults.gates["delete_session"] = gate = asyncio.Event()
    deleting = background(node.node.delete_session(name, None))
    await until(lambda: "delete_session" in node.faults.waiting)
    resuming = background(node.node.resume(name, None))
    await asyncio.sleep(0.05)
    gate.set()
    assert (await deleting).state == "DELETED"
    with pytest.raises(NotFoundError):
        await resuming
    assert node.engine.sequences == {} and name not in node.node._core.lives


async def test_a_resume_that_is_sent_again_after_a_pause_resumes_nothing(node: Running) -> None:
    name = await node.session("s", policy=CheckpointPolicy(0))
    await node.append(name, PROMPT)
    await node.idle(name)
    await node.node.pause(name, key("p"))
    first = await node.node.resume(name, key("r"))
    assert (first.view.state, first.source) == ("ACTIVE", "checkpoint")
    again = await node.node.resume(name, key("r"))
    assert (again.view.state, again.view.row.epoch) == ("ACTIVE", first.view.row.epoch)
    await node.node.pause(name, key("p2"))
    late = await node.node.resume(name, key("r"))
    assert (late.view.state, late.restored_bytes) == ("PAUSED", 0), "the first call's answer was lost on its way"
    assert node.engine.sequences == {}
    with pytest.raises(SessionPausedError):
        await node.append(name, b"x")
    with pytest.raises(RequestIdReusedError):
        await node.node.resume(name, key("r", "another session's"))
    assert (await node.node.resume(name, key("r2"))).view.state == "ACTIVE"


async def test_a_resume_whose_answer_was_lost_is_finished_when_it_is_sent_again(node: Running) -> None:
    name = await node.session("s")
    await node.append(name, PROMPT)
    await node.idle(name)
    await node.node.pause(name, None)
    node.faults.lost["acquire"] = 1
    with pytest.raises(StoreUnavailableError):
        await node.node.resume(name, key("r"))
    again = await node.node.resume(name, key("r"))
    assert (again.view.state, again.view.consumed) == ("ACTIVE", len(PROMPT))


async def test_a_pause_that_is_under_way_when_its_node_stops_is_kept(site: Site) -> None:
    node = await site.node()
    await node.workflow()
    name = await node.session("s")
    await node.append(name, PROMPT)
    gate = node.faults.gates.setdefault("release", asyncio.Event())
    pausing = background(node.node.pause(name, key("p")))
    await until(lambda: "release" in node.faults.waiting)
    stopping = background(node.stop())
    await asyncio.sleep(0.05)
    gate.set()
    await stopping
    with contextlib.suppress(NodeDrainingError):  # the node may end before the answer is on its way
        assert (await pausing).state == "PAUSED"
    other = await site.node()
    assert (await other.node.get_session(name)).state == "PAUSED"
