"""Bad input gets a clear error, with its code, reason and details, and changes nothing."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from forkpoint.client.session import Session
from forkpoint.errors import StateIncompatibleError, StoreFullError
from forkpoint.proto.forkpoint.v1 import checkpoint_pb2, common_pb2, session_pb2, workflow_pb2
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.server.app import serving
from tests.support.hash_engine import HashEngine
from tests.support.rpc_nodes import DIRECTLY
from tests.support.rpc_site import Refusal, Served, config_for, parts_for, served, settled

Code = grpc.StatusCode
NOBODY = "workflows/w/sessions/nobody"


@asynccontextmanager
async def unchanged(session: Session) -> AsyncIterator[None]:
    """The session is the same after the block, but for who owns it and what is in memory; and so is its log."""
    await settled(session)
    before, log = await session.get(), (await session.tokens().result()).token_ids
    yield
    after = await session.get()
    for answer in (before, after):
        for field in ("consumed", "recovery_time_estimate", "epoch", "node", "update_time"):
            answer.ClearField(field)
    assert after == before
    assert (await session.tokens().result()).token_ids == log


async def read_all(call: "grpc.aio.UnaryStreamCall[object, object]") -> list[object]:
    return [message async for message in call]


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("GetSession", pb.GetSessionRequest(name=NOBODY)),
        ("Append", pb.AppendRequest(name=NOBODY, text_utf8=b"x")),
        ("CancelGeneration", pb.CancelGenerationRequest(name=NOBODY)),
        ("Fork", pb.ForkRequest(name=NOBODY)),
        ("Rewind", pb.RewindRequest(name=NOBODY, position=0)),
        ("Pause", pb.PauseRequest(name=NOBODY)),
        ("Resume", pb.ResumeRequest(name=NOBODY)),
        ("DeleteSession", pb.DeleteSessionRequest(name=NOBODY)),
        ("UndeleteSession", pb.UndeleteSessionRequest(name=NOBODY)),
        ("UpdateSession", pb.UpdateSessionRequest(session=session_pb2.Session(name=NOBODY, labels={"a": "b"}))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_unknown_session_is_not_found(site: Served, method: str, request_: object) -> None:
    async with Refusal(Code.NOT_FOUND, "NOT_FOUND") as refusal:
        await getattr(site.raw.sessions, method)(request_)
    assert refusal.kinds == {"ErrorInfo", "ResourceInfo"}
    assert "workflows/w/sessions/nobody" in str(refusal.details["google.rpc.ResourceInfo"])


async def test_streams_of_an_unknown_session_are_not_found(site: Served) -> None:
    sessions, checkpoints = site.raw.sessions, site.raw.checkpoints
    for call in (
        sessions.Generate(pb.GenerateRequest(name=NOBODY)),
        sessions.ReadTokens(pb.ReadTokensRequest(name=NOBODY)),
        sessions.Export(pb.ExportRequest(name=NOBODY)),
        checkpoints.VerifyCheckpoint(checkpoint_pb2.VerifyCheckpointRequest(name=f"{NOBODY}/checkpoints/c")),
    ):
        async with Refusal(Code.NOT_FOUND, "NOT_FOUND"):
            await read_all(call)  # type: ignore[arg-type]


async def test_an_unknown_workflow_is_not_found(site: Served) -> None:
    async with Refusal(Code.NOT_FOUND, "NOT_FOUND"):
        await site.raw.sessions.CreateSession(pb.CreateSessionRequest(parent="workflows/nobody"))
    async with Refusal(Code.NOT_FOUND, "NOT_FOUND"):
        await site.raw.workflows.GetWorkflow(workflow_pb2.GetWorkflowRequest(name="workflows/nobody"))


async def test_a_name_that_is_taken_already_exists(site: Served) -> None:
    await site.session("s")
    async with Refusal(Code.ALREADY_EXISTS, "ALREADY_EXISTS") as refusal:
        await site.raw.sessions.CreateSession(pb.CreateSessionRequest(parent="workflows/w", session_id="s"))
    assert "ResourceInfo" in refusal.kinds
    async with Refusal(Code.ALREADY_EXISTS, "ALREADY_EXISTS"):
        await site.raw.workflows.CreateWorkflow(workflow_pb2.CreateWorkflowRequest(workflow_id="w"))


async def test_a_position_beyond_the_head_is_out_of_range(site: Served) -> None:
    session = await site.session(text="hello")
    async with unchanged(session):
        async with Refusal(Code.OUT_OF_RANGE, "POSITION_BEYOND_HEAD") as refusal:
            await site.raw.sessions.Fork(pb.ForkRequest(name=session.name, position=6))
        assert refusal.info.metadata["head"] == "5"
        async with Refusal(Code.OUT_OF_RANGE, "POSITION_BEYOND_HEAD"):
            await site.raw.sessions.Rewind(pb.RewindRequest(name=session.name, position=6))
        for request in (
            pb.ReadTokensRequest(name=session.name, start=6),
            pb.ReadTokensRequest(name=session.name, end=6),
        ):
            async with Refusal(Code.OUT_OF_RANGE, "POSITION_BEYOND_HEAD"):
                await read_all(site.raw.sessions.ReadTokens(request))  # type: ignore[arg-type]


async def test_a_request_id_with_other_content_is_refused(site: Served) -> None:
    session = await site.session()
    await session.append(text="one", request_id="r")
    async with unchanged(session), Refusal(Code.INVALID_ARGUMENT, "REQUEST_ID_REUSED") as refusal:
        await site.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"two", request_id="r"))
    assert refusal.kinds == {"ErrorInfo", "BadRequest"}


async def test_a_prompt_beyond_the_context_limit_is_refused_whole(tmp_path: Path) -> None:
    async with served(tmp_path, HashEngine(context_limit=64)) as site:
        session = await site.session(text="x" * 60)
        async with unchanged(session):
            async with Refusal(Code.RESOURCE_EXHAUSTED, "CONTEXT_FULL") as refusal:
                await site.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"12345"))
            assert refusal.kinds == {"ErrorInfo", "QuotaFailure"}
            async with Refusal(Code.RESOURCE_EXHAUSTED, "CONTEXT_FULL"):
                request = pb.GenerateRequest(name=session.name, input=pb.AppendRequest(text_utf8=b"12345"))
                await read_all(site.raw.sessions.Generate(request))  # type: ignore[arg-type]
        await session.append(text="1234")


async def test_text_that_is_not_utf8_is_refused_everywhere(site: Served) -> None:
    session = await site.session(text="hello")
    bad = b"ab\xffcd"
    chat = common_pb2.ChatMessages(messages=[common_pb2.ChatMessage(role="user", text_utf8=bad)])
    async with unchanged(session):
        for request in (
            pb.AppendRequest(name=session.name, text_utf8=bad),
            pb.AppendRequest(name=session.name, messages=chat),
        ):
            async with Refusal(Code.INVALID_ARGUMENT, "NOT_UTF8") as refusal:
                await site.raw.sessions.Append(request)
            assert refusal.kinds == {"ErrorInfo", "BadRequest"}
            assert refusal.info.metadata["byte_offset"] == "2"
        for generate in (
            pb.GenerateRequest(name=session.name, input=pb.AppendRequest(text_utf8=bad)),
            pb.GenerateRequest(name=session.name, stop_text=[bad]),
        ):
            async with Refusal(Code.INVALID_ARGUMENT, "NOT_UTF8"):
                await read_all(site.raw.sessions.Generate(generate))  # type: ignore[arg-type]


async def test_a_token_id_outside_the_vocabulary_is_refused(site: Served) -> None:
    session = await site.session(text="hello")
    async with unchanged(session):
        async with Refusal(Code.INVALID_ARGUMENT, "TOKEN_OUT_OF_RANGE") as refusal:
            tokens = common_pb2.TokenIds(ids=[1, 272])
            await site.raw.sessions.Append(pb.AppendRequest(name=session.name, tokens=tokens))
        assert (refusal.info.metadata["token_id"], refusal.info.metadata["index"]) == ("272", "1")
        async with Refusal(Code.INVALID_ARGUMENT, "TOKEN_OUT_OF_RANGE"):
            request = pb.GenerateRequest(name=session.name, stop_ids=[272])
            await read_all(site.raw.sessions.Generate(request))  # type: ignore[arg-type]


async def test_generate_on_an_empty_session_is_refused(site: Served) -> None:
    session = await site.session()
    async with unchanged(session), Refusal(Code.INVALID_ARGUMENT, "EMPTY_SESSION") as refusal:
        await read_all(site.raw.sessions.Generate(pb.GenerateRequest(name=session.name)))  # type: ignore[arg-type]
    assert refusal.kinds == {"ErrorInfo", "BadRequest"}


async def test_a_deleted_session_can_not_be_forked_or_appended_to(site: Served) -> None:
    session = await site.session(text="hello")
    await session.delete()
    for call in (
        site.raw.sessions.Fork(pb.ForkRequest(name=session.name)),
        site.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x")),
    ):
        async with Refusal(Code.NOT_FOUND, "NOT_FOUND"):
            await call
    assert (await session.get()).state == session_pb2.Session.DELETED


async def test_a_second_writer_is_told_that_the_session_is_busy(site: Served) -> None:
    session = await site.session(text="hello")
    site.engine.step_pause = 0.01
    generation = session.generate(max_tokens=400)
    await anext(generation)
    async with Refusal(Code.ABORTED, "SESSION_BUSY") as refusal:
        await site.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"))
    assert refusal.kinds == {"ErrorInfo", "RetryInfo"}
    async with Refusal(Code.ABORTED, "SESSION_BUSY"):
        await read_all(site.raw.sessions.Generate(pb.GenerateRequest(name=session.name)))  # type: ignore[arg-type]
    site.engine.step_pause = 0.0
    await generation.result()
    assert len(generation.token_ids) == 400


async def test_a_paused_session_wants_to_be_resumed_first(site: Served) -> None:
    session = await site.session(text="hello")
    await session.pause()
    async with unchanged(session), Refusal(Code.FAILED_PRECONDITION, "SESSION_PAUSED") as refusal:
        await site.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"))
    assert refusal.kinds == {"ErrorInfo", "PreconditionFailure"}


async def test_a_stale_position_or_hash_is_a_conflict_and_a_position_beyond_the_head_is_data_loss(site: Served) -> None:
    session = await site.session(text="hello")
    async with unchanged(session):
        for fields in ({"expected_position": 4}, {"expected_position": 5, "expected_head_hash": b"x" * 32}):
            async with Refusal(Code.ABORTED, "POSITION_CONFLICT") as refusal:
                await site.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x", **fields))
            assert refusal.info.metadata["head"] == "5"
        async with Refusal(Code.DATA_LOSS, "LOG_TAIL_MISSING") as refusal:
            await site.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x", expected_position=6))
        assert refusal.kinds == {"ErrorInfo"}


async def test_more_durability_than_the_store_gives_is_refused(site: Served) -> None:
    session = await site.session(text="hello")
    async with unchanged(session), Refusal(Code.FAILED_PRECONDITION, "DURABILITY_NOT_REACHED") as refusal:
        request = pb.AppendRequest(name=session.name, text_utf8=b"x", durability=common_pb2.REPLICATED)
        await site.raw.sessions.Append(request)
    assert refusal.kinds == {"ErrorInfo", "PreconditionFailure"}
    answer = await session.append(text="x", durability="LOCAL_FSYNC")
    assert answer.durability == common_pb2.LOCAL_FSYNC


async def test_a_stale_etag_is_refused(site: Served) -> None:
    session = await site.session()
    etag = (await session.get()).etag
    await session.update(labels={"a": "1"}, etag=etag)
    async with unchanged(session), Refusal(Code.ABORTED, "ETAG_MISMATCH"):
        stale = session_pb2.Session(name=session.name, labels={"a": "2"}, etag=etag)
        await site.raw.sessions.UpdateSession(pb.UpdateSessionRequest(session=stale))


async def test_a_full_disk_is_said_and_loses_nothing(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await site.session(text="hello")

    async def full(*_: object, **__: object) -> None:
        raise StoreFullError("catalog", "no space left on device")

    async with unchanged(session):
        with monkeypatch.context() as patch:
            patch.setattr(site.parts.catalog, "append", full)
            async with Refusal(Code.RESOURCE_EXHAUSTED, "STORE_FULL") as refusal:
                await site.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x", request_id="again"))
            assert refusal.kinds == {"ErrorInfo", "QuotaFailure"}
    answer = await session.append(text="x", request_id="again")
    assert (answer.head, answer.replayed) == (6, False)


async def test_a_damaged_blob_is_found_by_verify(site: Served, tmp_path: Path) -> None:
    session = await site.session(text="x" * 100)
    checkpoint = await session.checkpoint("c")
    digest = checkpoint.parts[0].blake3
    (blob,) = [path for path in (tmp_path / "data" / "blobs").rglob("*") if path.is_file() and digest[4:] in path.name]
    blob.chmod(0o600)
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.write_bytes(content)
    events = [event async for event in site.client.checkpoints.verify(checkpoint.name)]
    problems = {event.part.part.name: event.part.problem for event in events if event.HasField("part")}
    assert [name for name, problem in problems.items() if problem] == [checkpoint.parts[0].name]
    assert events[-1].result.parts_damaged == 1


async def test_a_store_of_another_model_is_refused_at_the_start(tmp_path: Path) -> None:
    async with served(tmp_path):
        pass
    config = config_for(tmp_path)
    with pytest.raises(StateIncompatibleError):
        async with serving(config, parts_for(config, HashEngine(model=b"other".ljust(32)))):
            pass


async def test_a_second_server_does_not_take_a_live_session_but_names_its_owner(site: Served, tmp_path: Path) -> None:
    session = await site.session(text="hello")
    async with unchanged(session), served(tmp_path / "data", workflow=False, node="other") as second:
        async with Refusal(Code.UNAVAILABLE, "SESSION_RELOCATING") as refusal:
            await second.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x"), metadata=DIRECTLY)
        assert refusal.kinds == {"ErrorInfo", "RetryInfo"}
        assert refusal.info.metadata["address"] == site.address


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("GetSession", pb.GetSessionRequest(), "name"),
        ("GetSession", pb.GetSessionRequest(name="sessions/s"), "name"),
        ("GetSession", pb.GetSessionRequest(name="workflows/W/sessions/s"), "name"),
        ("CreateSession", pb.CreateSessionRequest(parent="w"), "parent"),
        ("CreateSession", pb.CreateSessionRequest(parent="workflows/w", session_id="Bad Id"), "session_id"),
        (
            "CreateSession",
            pb.CreateSessionRequest(
                parent="workflows/w",
                session=session_pb2.Session(checkpoint_policy=common_pb2.CheckpointPolicy(every_tokens=17)),
            ),
            "session.checkpoint_policy.every_tokens",
        ),
        (
            "CreateSession",
            pb.CreateSessionRequest(
                parent="workflows/w", session=session_pb2.Session(labels={str(i): "" for i in range(65)})
            ),
            "session.labels",
        ),
        ("Append", pb.AppendRequest(name="workflows/w/sessions/s"), "input"),
        ("Append", pb.AppendRequest(name="workflows/w/sessions/s", text_utf8=b"x", request_id="r" * 129), "request_id"),
        (
            "Append",
            pb.AppendRequest(name="workflows/w/sessions/s", text_utf8=b"x", expected_position=-1),
            "expected_position",
        ),
        (
            "Append",
            pb.AppendRequest(name="workflows/w/sessions/s", text_utf8=b"x", expected_head_hash=b"x"),
            "expected_head_hash",
        ),
        ("Append", pb.AppendRequest(name="workflows/w/sessions/s", text_utf8=b"x" * (2**20 + 1)), "text_utf8"),
        ("Fork", pb.ForkRequest(name="workflows/w/sessions/s", count=1025), "count"),
        ("Fork", pb.ForkRequest(name="workflows/w/sessions/s", count=2, session_ids=["a"]), "session_ids"),
        ("Fork", pb.ForkRequest(name="workflows/w/sessions/s", session_ids=["a", "a"]), "session_ids"),
        ("Fork", pb.ForkRequest(name="workflows/w/sessions/s", position=-1), "position"),
        ("Rewind", pb.RewindRequest(name="workflows/w/sessions/s"), "position"),
        ("ListSessions", pb.ListSessionsRequest(parent="workflows/w", page_size=-1), "page_size"),
        ("ListSessions", pb.ListSessionsRequest(parent="workflows/w", page_token="nonsense"), "page_token"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_wrong_field_is_named(site: Served, method: str, request_: object, field: str) -> None:
    await site.session(text="hello")
    async with Refusal(Code.INVALID_ARGUMENT, "INVALID_FIELD") as refusal:
        await getattr(site.raw.sessions, method)(request_)
    assert refusal.kinds == {"ErrorInfo", "BadRequest"}
    assert refusal.info.metadata["field"] == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"sampling": common_pb2.Sampling(temperature=-1)}, "sampling.temperature"),
        ({"sampling": common_pb2.Sampling(temperature=float("nan"))}, "sampling.temperature"),
        ({"sampling": common_pb2.Sampling(top_k=-1)}, "sampling.top_k"),
        ({"sampling": common_pb2.Sampling(top_p=0)}, "sampling.top_p"),
        ({"sampling": common_pb2.Sampling(min_p=1)}, "sampling.min_p"),
        ({"stop_text": [b""]}, "stop_text[0]"),
        ({"stop_text": [b"x" * 257]}, "stop_text[0]"),
        ({"stop_text": [b"x"] * 17}, "stop_text"),
        ({"resume_position": -1}, "resume_position"),
        ({"expected_position": 5, "input": pb.AppendRequest(expected_position=4)}, "input.expected_position"),
        ({"input": pb.AppendRequest(name="workflows/w/sessions/t")}, "input.name"),
    ],
    ids=str,
)
async def test_a_wrong_generation_parameter_is_named(site: Served, fields: dict[str, object], field: str) -> None:
    session = await site.session(text="hello")
    async with unchanged(session), Refusal(Code.INVALID_ARGUMENT, "INVALID_FIELD") as refusal:
        await read_all(site.raw.sessions.Generate(pb.GenerateRequest(name=session.name, **fields)))  # type: ignore[arg-type]
    assert refusal.info.metadata["field"] == field
