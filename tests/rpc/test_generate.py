"""Generate over the wire: one generation a request id, streams by position, text, stops, cancel."""

import asyncio
from pathlib import Path

import grpc
import pytest

from forkpoint.client.errors import RemoteError
from forkpoint.proto.forkpoint.v1 import common_pb2, session_pb2
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.server.engine.batch import Sample
from forkpoint.server.rpc import guard
from tests.support.hash_engine import HashEngine, continuation
from tests.support.rpc_site import Refusal, Served, served

GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)


async def test_a_generation_starts_sends_its_tokens_and_finishes(site: Served) -> None:
    session = await site.session(text="hello")
    generation = await session.generate(max_tokens=40, logprobs=True, request_id="g").result()
    assert generation.started is not None and generation.finished is not None
    started, finished = generation.started, generation.finished
    assert (started.request_id, started.start, started.max_tokens, started.sampling.seed) == ("g", 5, 40, 7)
    tokens, _ = continuation(b"hello", 40, GREEDY)
    assert generation.token_ids == tokens
    assert generation.text == bytes(tokens)
    assert len(generation.logprobs) == 40
    now = await session.get()
    assert (finished.reason, finished.head, finished.head_hash) == (common_pb2.LENGTH, 45, now.head_hash)
    assert (finished.usage.prompt_tokens, finished.usage.generated_tokens, finished.stop_position) == (5, 40, -1)


async def test_input_and_generation_in_one_call(site: Served) -> None:
    session = await site.session(text="hello")
    generation = await session.generate(text=" world", max_tokens=5, expected_position=5).result()
    assert generation.started is not None
    assert (generation.started.input_start, generation.started.start) == (5, 11)
    assert (await session.tokens().result()).text == b"hello world" + generation.text


@pytest.mark.parametrize("resume", [None, 5, 9, 25])
async def test_the_same_request_id_attaches_again_also_when_it_is_over(site: Served, resume: int | None) -> None:
    session = await site.session(text="hello")
    first = await session.generate(max_tokens=20, logprobs=True, request_id="g").result()
    again = await session.generate(max_tokens=20, logprobs=True, request_id="g", resume_position=resume).result()
    skipped = (resume or 5) - 5
    assert again.token_ids == first.token_ids[skipped:]
    assert again.logprobs == first.logprobs[skipped:]
    assert again.finished == first.finished
    assert (await session.get()).head == 25


async def test_another_call_with_a_generations_request_id_is_refused(site: Served) -> None:
    session = await site.session(text="hello")
    await session.generate(max_tokens=5, request_id="g").result()
    for other in ({"max_tokens": 6}, {"max_tokens": 5, "temperature": 1.0}, {"max_tokens": 5, "text": "x"}):
        with pytest.raises(RemoteError) as error:
            await session.generate(request_id="g", **other).result()
        assert error.value.reason == "REQUEST_ID_REUSED"
    again = await session.generate(max_tokens=5, request_id="g", cancel_on_disconnect=True).result()
    assert len(again.token_ids) == 5, "how a call reads its answer is not part of what it is"


async def test_a_resume_position_that_the_log_never_reached_is_data_loss(site: Served) -> None:
    session = await site.session(text="hello")
    await session.generate(max_tokens=5, request_id="g").result()
    call = site.raw.sessions.Generate(
        pb.GenerateRequest(name=session.name, request_id="g", max_tokens=5, resume_position=11)
    )
    with pytest.raises(grpc.aio.AioRpcError):
        await call.read()
        await call.read()


async def test_two_readers_of_one_generation_get_the_same_tokens(site: Served) -> None:
    session = await site.session(text="hello")
    site.engine.step_pause = 0.002
    first = session.generate(max_tokens=60, request_id="g")
    await anext(first)
    second = session.generate(max_tokens=60, request_id="g")
    await asyncio.gather(first.result(), second.result())
    assert first.token_ids == second.token_ids
    assert len(first.token_ids) == 60


async def test_the_text_of_a_stream_that_was_cut_anywhere_is_the_text_of_the_whole(tmp_path: Path) -> None:
    engine = HashEngine(alphabet=tuple("hé€😀".encode()))
    async with served(tmp_path, engine) as site:
        session = await site.session(text="x")
        whole = await session.generate(max_tokens=60, stop_text=["\u20ac\u20ac"], request_id="g").result()
        for cut in range(0, len(whole.token_ids) + 1, 7):
            tail = await session.generate(
                max_tokens=60, stop_text=["\u20ac\u20ac"], request_id="g", resume_position=1 + cut
            ).result()
            assert whole.text.endswith(tail.text)
            assert tail.token_ids == whole.token_ids[cut:]


async def test_stop_text_and_stop_ids_end_a_generation_and_say_where(site: Served) -> None:
    session = await site.session(text="hello")
    tokens, _ = continuation(b"hello", 40, GREEDY)
    stop = bytes(tokens[10:12])
    at = bytes(tokens).index(stop)
    generation = await session.generate(max_tokens=40, stop_text=[stop]).result()
    assert generation.finished is not None
    assert (generation.finished.reason, generation.finished.stop_position) == (common_pb2.STOP, 5 + at)
    assert generation.text == bytes(tokens[:at]), "the stop text is not part of the text"
    assert generation.token_ids == tokens[: at + 2], "the log keeps every token up to the one that completes it"
    other = await site.session("t", text="hello")
    generation = await other.generate(max_tokens=40, stop_ids=[tokens[3]]).result()
    assert generation.finished is not None
    assert generation.finished.stop_position == 5 + tokens.index(tokens[3])


async def test_cancel_ends_a_generation_at_a_token_border(site: Served) -> None:
    session = await site.session(text="hello")
    site.engine.step_pause = 0.002
    generation = session.generate(max_tokens=2000)
    await anext(generation)
    now = await session.cancel_generation()
    assert now.state == session_pb2.Session.ACTIVE
    await generation.result()
    assert generation.finished is not None
    assert generation.finished.reason == common_pb2.CANCELLED
    assert generation.position == generation.finished.head == (await session.get()).head
    assert (await session.cancel_generation()).head == generation.finished.head, "none is running: fine"


async def test_pause_ends_a_generation_and_says_so(site: Served) -> None:
    site.engine.step_pause = 0.002
    session = await site.session(text="hello")
    generation = session.generate(max_tokens=2000)
    await anext(generation)
    await session.pause()
    await generation.result()
    assert generation.finished is not None
    assert generation.finished.reason == common_pb2.PAUSED


async def test_delete_ends_the_stream_of_a_generation(site: Served) -> None:
    site.engine.step_pause = 0.002
    session = await site.session(text="hello")
    generation = session.generate(max_tokens=2000)
    await anext(generation)
    await session.delete()
    try:
        await generation.result()
    except RemoteError as error:
        assert error.reason == "NOT_FOUND", "the reader came too late to learn more"
    else:
        assert generation.finished is not None
        assert generation.finished.reason == common_pb2.CANCELLED


async def test_a_reader_that_leaves_does_not_end_the_generation_unless_it_said_so(site: Served) -> None:
    site.engine.step_pause = 0.002
    for name, cancels in (("a", False), ("b", True)):
        session = await site.session(name, text="hello")
        generation = session.generate(max_tokens=200, cancel_on_disconnect=cancels, request_id=name)
        await anext(generation)
        await generation.detach()
        again = session.generate(max_tokens=200, request_id=name)
        await again.result()
        assert again.finished is not None
        assert again.finished.reason == (common_pb2.CANCELLED if cancels else common_pb2.LENGTH)
        assert (len(again.token_ids) == 200) is not cancels


async def test_a_generation_without_a_request_id_is_told_one(site: Served) -> None:
    session = await site.session(text="hello")
    call = site.raw.sessions.Generate(pb.GenerateRequest(name=session.name, max_tokens=3))
    events = [event async for event in call]
    assert events[0].started.request_id.startswith("g-")
    again = await session.generate(max_tokens=3, request_id=events[0].started.request_id).result()
    assert again.token_ids == [token for event in events for token in event.chunk.token_ids]


async def test_heartbeats_come_while_there_are_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(tmp_path) as site:
        monkeypatch.setattr(site.running.rpc.guard, "_heartbeat_seconds", 0.05)
        session = await site.session(text="hello")
        site.engine.step_pause = 0.4
        events = [
            event async for event in site.raw.sessions.Generate(pb.GenerateRequest(name=session.name, max_tokens=2))
        ]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds.count("heartbeat") >= 4
        positions = [event.heartbeat.position for event in events if event.HasField("heartbeat")]
        assert set(positions) <= {0, 5, 6, 7} and positions == sorted(positions)
        assert kinds[-1] == "finished"


async def test_the_context_limit_ends_a_generation(tmp_path: Path) -> None:
    async with served(tmp_path, HashEngine(context_limit=20)) as site:
        session = await site.session(text="hello")
        generation = await session.generate().result()
        assert generation.finished is not None
        assert generation.finished.reason == common_pb2.CONTEXT_FULL
        assert (await session.get()).head == 20


async def test_an_unforeseen_error_is_internal_with_an_incident_that_the_log_explains_without_its_text(
    site: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("secret token contents")

    monkeypatch.setattr(site.running.node, "get_workflow", broken)
    from forkpoint.proto.forkpoint.v1 import workflow_pb2

    async with Refusal(grpc.StatusCode.INTERNAL, "INTERNAL") as refusal:
        await site.raw.workflows.GetWorkflow(workflow_pb2.GetWorkflowRequest(name="workflows/w"))
    incident = refusal.info.metadata["incident"]
    (record,) = [record for record in caplog.records if record.name == guard.LOG.name]
    facts = vars(record)["facts"]
    assert facts["incident"] == incident
    assert facts["errors"][0]["type"] == "KeyError"
    assert "secret" not in str(facts) + refusal.message
