"""Any node takes any call: what it can't answer itself it sends on, once, and the answer is the owner's."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from forkpoint.client.inputs import chunks
from forkpoint.client.session import Session
from forkpoint.errors import SessionRelocatingError
from forkpoint.limits import INPUT_TOKENS_MAX
from forkpoint.proto.forkpoint.v1 import (
    admin_pb2,
    checkpoint_pb2,
    session_pb2,
    session_service_pb2,
    workflow_pb2,
)
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.server.engine.batch import Sample
from forkpoint.server.rpc import forward, routes
from tests.support.hash_engine import HashEngine, continuation
from tests.support.rpc_nodes import DIRECTLY, Nodes, nodes
from tests.support.rpc_site import Refusal, Served

Code = grpc.StatusCode
GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)
FORWARDED = (("forkpoint-forwarded", "x"),)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Nodes]:
    """Nodes a and b."""
    async with nodes(tmp_path) as running:
        yield running


@pytest.fixture
def a(pair: Nodes) -> Served:
    return pair.by_name["a"]


@pytest.fixture
def b(pair: Nodes) -> Served:
    return pair.by_name["b"]


def at(site: Served, session: Session) -> Session:
    """The same session by another node's client."""
    return site.client.sessions.open(session.name)


async def test_every_call_for_a_session_works_at_a_node_that_does_not_own_it(a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    away = at(b, session)
    assert (await away.append(text=" wor")).start == 5
    header = pb.AppendChunk(header=pb.AppendRequest(name=session.name))
    parts = [header, pb.AppendChunk(text_utf8=b"l"), pb.AppendChunk(text_utf8=b"d")]
    uploaded = await b.raw.sessions.UploadAppend(iter(parts))
    assert (uploaded.start, uploaded.head, uploaded.replayed) == (9, 11, False)
    generation = await away.generate(max_tokens=20, logprobs=True).result()
    tokens, _ = continuation(b"hello world", 20, GREEDY)
    assert generation.token_ids == tokens and len(generation.logprobs) == 20
    assert generation.reconnects == []
    updated = await away.update(labels={"k": "v"}, every_tokens=64)
    assert (updated.checkpoint_policy.every_tokens, dict(updated.labels)) == (64, {"k": "v"})
    checkpoint = await away.checkpoint("c")
    assert checkpoint.position == 31
    (child,) = await away.fork(session_ids=["child"])
    assert a.running.node.counters.forks == 1, "the owner forks: it has the state"
    assert (await child.get()).head == 31
    await b.client.checkpoints.delete(checkpoint.name)
    assert (await away.rewind(11)).head == 11
    running = away.generate(max_tokens=2000)
    await anext(running)
    now = await away.cancel_generation()
    assert now.head < 2011
    await running.result()
    assert (now.node, now.epoch) == ("nodes/a", 1)
    assert b.engine.steps == [], "nothing was computed where it was asked for"
    assert (await away.pause()).state == session_pb2.Session.PAUSED
    assert (await away.resume()).session.node == "nodes/b", "of equals the node that is asked takes it"
    await at(a, session).delete()
    assert (
        await a.raw.sessions.GetSession(pb.GetSessionRequest(name=session.name))
    ).state == session_pb2.Session.DELETED


def test_every_method_is_either_one_that_any_node_answers_or_one_that_may_be_sent_on() -> None:
    modules = (session_service_pb2, checkpoint_pb2, workflow_pb2, admin_pb2)
    methods = {
        f"/{service.full_name}/{method.name}"
        for module in modules
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }
    assert methods >= routes.HERE
    free, sent, direct = routes.Marks(False, False), routes.Marks(True, False), routes.Marks(False, True)
    on = {method for method in methods if routes.may_go_on(method, free)}
    assert on == methods - routes.HERE
    assert not any(routes.may_go_on(method, marks) for method in methods for marks in (sent, direct))
    assert not routes.may_go_on("/forkpoint.internal.v1.PeerService/CutOver", free)
    assert {method.rpartition("/")[2] for method in on} == {
        *("GetSession", "UpdateSession", "DeleteSession", "Append", "UploadAppend", "Generate", "CancelGeneration"),
        *("ReadTokens", "Fork", "Rewind", "Pause", "Resume", "CreateCheckpoint", "DeleteCheckpoint"),
        *("MigrateSession", "DrainNode", "UndrainNode"),
    }


async def test_what_only_the_owner_knows_is_told_at_any_node(a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    a.engine.step_pause = 0.005
    generation = session.generate(max_tokens=500)
    await anext(generation)
    told = await at(b, session).get()
    assert (told.state, told.node) == (session_pb2.Session.GENERATING, "nodes/a")
    assert told.consumed > 0
    (listed,) = [each async for each in b.client.sessions.list("w")]
    assert (listed.state, listed.consumed) == (session_pb2.Session.ACTIVE, 0), "a list asks no other node"


async def test_an_owner_that_does_not_answer_quickly_is_described_by_its_row(
    a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await a.session(text="hello")

    async def hang(name: object) -> None:
        await asyncio.sleep(60)

    monkeypatch.setattr(a.running.node, "get_session", hang)
    async with asyncio.timeout(5):
        told = await at(b, session).get()
    assert (told.head, told.node, told.consumed) == (5, "nodes/a", 0)


async def test_a_client_that_wants_the_owner_itself_is_told_its_address(a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    async with Refusal(Code.UNAVAILABLE, "SESSION_RELOCATING") as refusal:
        await b.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"), metadata=DIRECTLY)
    assert refusal.info.metadata["address"] == a.address
    call = b.raw.sessions.ReadTokens(pb.ReadTokensRequest(name=session.name, follow=True), metadata=DIRECTLY)
    async with Refusal(Code.UNAVAILABLE, "SESSION_RELOCATING") as refusal:
        while await call.read() is not grpc.aio.EOF:
            continue
    assert refusal.info.metadata["resume_position"] == "5"


async def test_a_call_that_a_node_sent_is_never_sent_on(a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    async with Refusal(Code.UNAVAILABLE, "SESSION_RELOCATING"):
        await b.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"), metadata=FORWARDED)
    call = b.raw.sessions.Generate(pb.GenerateRequest(name=session.name), metadata=FORWARDED)
    async with Refusal(Code.UNAVAILABLE, "SESSION_RELOCATING"):
        await call.read()
    assert (await session.get()).head == 5


async def test_nodes_that_each_take_the_other_for_the_owner_send_nothing_in_circles(
    a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await a.client.sessions.create("w", "s")
    calls = dict.fromkeys("ab", 0)

    def mislead(site: Served, name: str, other: Served) -> None:
        async def elsewhere(call: Any) -> None:
            calls[name] += 1
            raise SessionRelocatingError(session.name, "the other", other.address)

        monkeypatch.setattr(site.running.node, "append", elsewhere)

    mislead(a, "a", b)
    mislead(b, "b", a)
    monkeypatch.setattr(forward, "FORWARD_SECONDS_MAX", 0.3)
    async with Refusal(Code.UNAVAILABLE, "SESSION_RELOCATING"):
        await a.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"))
    assert calls["a"] == calls["b"] > 1, "each try goes to the other once, and comes back"


async def test_a_refusal_of_the_owner_comes_with_all_its_details(a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    requests = [
        pb.AppendRequest(name=session.name, text_utf8=b"x", expected_position=3),
        pb.AppendRequest(name=session.name, text_utf8=b"x", expected_position=9),
        pb.AppendRequest(name=session.name, tokens=pb_tokens(10**6)),
    ]
    for request in requests:
        told: list[tuple[Any, Any, Any]] = []
        for site in (a, b):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await site.raw.sessions.Append(request)
            error = caught.value
            details = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
            assert details
            told.append((error.code(), error.details(), details))
        assert told[0] == told[1]


def pb_tokens(*ids: int) -> Any:
    return pb.AppendRequest(tokens={"ids": ids}).tokens  # type: ignore[arg-type]


async def test_a_call_without_an_id_has_one_effect_however_often_it_is_sent(
    a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner does it, and the connection breaks before the answer is there."""
    session = await a.session(text="hello")
    append, done = a.running.node.append, 0

    async def cut_off(call: Any) -> Any:
        nonlocal done
        result = await append(call)
        done += 1
        if done == 1:
            raise SessionRelocatingError(session.name, "nobody", "")
        return result

    monkeypatch.setattr(a.running.node, "append", cut_off)
    answer = await b.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"))
    assert (answer.start, answer.head, answer.replayed) == (5, 6, True)
    uploaded = [pb.AppendChunk(header=pb.AppendRequest(name=session.name)), pb.AppendChunk(text_utf8=b"yz")]
    done = 0
    answer = await b.raw.sessions.UploadAppend(iter(uploaded))
    assert (answer.start, answer.head, answer.replayed) == (6, 8, True)
    again = await b.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"))
    assert again.start == 8, "a second call without an id is a second call"


async def test_the_largest_messages_pass_through_another_node(tmp_path: Path) -> None:
    def large() -> HashEngine:
        return HashEngine(slots=1, pages=1 << 20, context_limit=1 << 23)

    async with nodes(tmp_path, "ab", large) as pair:
        a, b = pair.by_name["a"], pair.by_name["b"]
        session = await a.session(text="x")
        ids = pb_tokens(*[255] * INPUT_TOKENS_MAX)
        async with Refusal(Code.ABORTED, "POSITION_CONFLICT"):
            await b.raw.sessions.Append(pb.AppendRequest(name=session.name, tokens=ids, expected_position=0))
        request = pb.AppendRequest(name=session.name, text_utf8=b"z" * 200_000)
        uploaded = await b.raw.sessions.UploadAppend(chunks(request))
        assert (uploaded.start, len(uploaded.token_ids)) == (1, 200_000)
        assert (await session.get()).node == "nodes/a"


async def test_a_deadline_holds_at_the_owner_too(a: Served, b: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await a.session(text="hello")
    ended = asyncio.Event()

    async def hang(call: object) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    monkeypatch.setattr(a.running.node, "append", hang)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await b.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"), timeout=0.3)
    assert caught.value.code() is Code.DEADLINE_EXCEEDED
    async with asyncio.timeout(5):
        await ended.wait()


async def test_a_call_that_is_cancelled_is_cancelled_at_the_owner_too(
    a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await a.session(text="hello")
    began, ended = asyncio.Event(), asyncio.Event()

    async def hang(call: object) -> None:
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    monkeypatch.setattr(a.running.node, "append", hang)
    call = b.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"))
    async with asyncio.timeout(5):
        await began.wait()
        call.cancel()
        await ended.wait()


async def test_a_session_of_a_node_that_was_killed_is_served_by_the_next_call(
    pair: Nodes, a: Served, b: Served
) -> None:
    session = await a.session(text="hello")
    await at(b, session).append(text="x")
    await pair.vanish("a")
    answer = await b.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"y"))
    assert (answer.start, answer.epoch) == (6, 2)


async def test_a_session_of_a_node_that_was_stopped_is_served_by_the_next_call(
    pair: Nodes, a: Served, b: Served
) -> None:
    """Nobody waits until a directory has noticed."""
    session = await a.session(text="hello")
    await at(b, session).append(text="x")
    async with asyncio.TaskGroup() as group:
        stop = group.create_task(pair.stop("a"))
        while not stop.done():
            await at(b, session).append(text="y")
    answer = await b.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"z"), timeout=2.0)
    assert (answer.epoch, answer.head - answer.start) == (2, 1)


async def test_an_owner_out_of_reach_is_named_so_that_the_client_can_try(
    a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await a.session(text="hello")
    gone = "127.0.0.1:1"

    async def cut_off(call: object) -> None:
        raise SessionRelocatingError(session.name, "a", gone)

    monkeypatch.setattr(b.running.node, "append", cut_off)
    monkeypatch.setattr(forward, "FORWARD_SECONDS_MAX", 0.2)
    async with Refusal(Code.UNAVAILABLE, "SESSION_RELOCATING") as refusal:
        await b.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"))
    assert refusal.info.metadata["address"] == gone


async def test_a_directory_that_names_a_node_that_is_gone_corrects_itself(pair: Nodes, tmp_path: Path) -> None:
    """Its owner ended, and another process serves at its address now."""
    a, b = pair.by_name["a"], pair.by_name["b"]
    port = int(a.address.rpartition(":")[2])
    session = await a.session(text="hello")
    await at(b, session).append(text="x")
    await pair.vanish("a")
    again = await pair.start("c", port=port)
    assert again.address == a.address
    async with asyncio.timeout(5):
        answers = await asyncio.gather(*(at(b, session).append(text="y") for _ in range(20)), return_exceptions=True)
    done = [answer for answer in answers if isinstance(answer, pb.AppendResponse)]
    assert done and {answer.epoch for answer in done} == {2}, "one new owner, whoever was asked first"


async def test_a_session_is_moved_whoever_is_asked(tmp_path: Path) -> None:
    async with nodes(tmp_path, "abc") as three:
        session = await three.by_name["a"].session(text="hello")
        events = [event async for event in at(three.by_name["c"], session).migrate(to="nodes/b")]
        assert events[-1].session.node == "nodes/b"
        answer = await at(three.by_name["a"], session).append(text="x")
        assert (answer.start, answer.epoch) == (5, 2)


async def test_forks_are_made_without_an_owner_that_is_out_of_reach(a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    await a.running.rpc._server.stop(None)  # its lease goes on
    (child,) = await at(b, session).fork(session_ids=["child"])
    assert len((await child.generate(max_tokens=3).result()).token_ids) == 3
