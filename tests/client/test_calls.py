"""Unary calls of the client: request ids, retries, errors as exceptions, large inputs."""

from typing import Any

import grpc
import pytest

from forkpoint.client.errors import RemoteError, remote_error
from forkpoint.client.inputs import Messages, append_request, chunks, is_large
from forkpoint.client.wire import SERVICE_CONFIG, Wire
from forkpoint.errors import StoreUnavailableError
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from tests.support.rpc_site import Served


async def test_a_call_is_repeated_while_the_node_is_unavailable(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await site.session()
    node = site.running.node
    append, calls = node.append, []

    async def flaky(call: Any) -> Any:
        calls.append(call.request)
        if len(calls) < 3:
            raise StoreUnavailableError("catalog", "locked")
        return await append(call)

    monkeypatch.setattr(node, "append", flaky)
    assert (await session.append(text="hello")).head == 5
    assert len(calls) == 3
    assert len({key.request_id for key in calls}) == 1, "all tries are one call"
    assert (await session.get()).head == 5


async def test_after_four_tries_the_error_is_the_callers(site: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await site.session()
    calls = []

    async def broken(call: Any) -> Any:
        calls.append(call)
        raise StoreUnavailableError("catalog", "locked")

    monkeypatch.setattr(site.running.node, "append", broken)
    with pytest.raises(RemoteError) as error:
        await session.append(text="hello")
    assert (error.value.code, error.value.reason) == ("UNAVAILABLE", "STORE_UNAVAILABLE")
    assert error.value.retry_after_s == 0.5
    assert len(calls) == SERVICE_CONFIG["methodConfig"][0]["retryPolicy"]["maxAttempts"]  # type: ignore[index]


async def test_an_error_has_its_facts_and_the_fields_to_blame(site: Served) -> None:
    session = await site.session()
    with pytest.raises(RemoteError) as error:
        await session.append(tokens=[1, 999])
    refused = error.value
    assert (refused.code, refused.reason) == ("INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE")
    assert refused.metadata == {"token_id": "999", "index": "1", "vocab_size": "272"}
    assert [violation.field for violation in refused.violations] == ["token_ids"]
    assert str(refused).startswith("INVALID_ARGUMENT/TOKEN_OUT_OF_RANGE: token id 999")
    assert not refused.is_transport


def test_an_error_without_details_is_told_apart_by_its_code() -> None:
    for code, is_transport in ((grpc.StatusCode.UNAVAILABLE, True), (grpc.StatusCode.INTERNAL, False)):
        error = remote_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone"))
        assert (error.reason, error.is_transport) == ("", is_transport)
    broken = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    assert remote_error(grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), broken, "x")).reason == ""


def test_only_one_input_may_be_given() -> None:
    with pytest.raises(ValueError, match="one of"):
        append_request([1], "x", None, False)
    with pytest.raises(ValueError, match="messages"):
        append_request(None, "x", None, True)
    with pytest.raises(ValueError, match="thinking"):
        append_request(None, "x", None, False, thinking=False)


def test_an_upload_of_messages_says_all_that_their_call_says() -> None:
    turns: Messages = [("user", "a", "Ann"), ("user", "b")]
    request = append_request(None, None, turns, False, thinking=True, thinking_effort="low")
    joined = pb.AppendRequest()
    for chunk in chunks(request):
        joined.messages.MergeFrom(chunk.messages)
    assert joined == request
    assert (request.messages.thinking, request.messages.messages[0].name) == (True, "Ann")
    assert not append_request(None, None, turns, False).messages.HasField("thinking")


@pytest.mark.parametrize("size", [2**20, 2**20 + 1])
def test_large_text_is_cut_into_chunks_that_join_to_it(size: int) -> None:
    request = append_request(None, b"x" * size, None, False)
    request.name, request.request_id = "workflows/w/sessions/s", "r"
    assert is_large(request) is (size > 2**20)
    first, *rest = chunks(request)
    assert (first.header.name, first.header.request_id, first.header.WhichOneof("input")) == (request.name, "r", None)
    assert b"".join(chunk.text_utf8 for chunk in rest) == request.text_utf8


@pytest.mark.parametrize("kind", ["text", "tokens", "messages"])
async def test_an_upload_of_any_kind_is_the_append_it_stands_for(site: Served, kind: str) -> None:
    session = await site.session()
    text = "hé" * 50 if kind == "text" else None
    tokens = list(range(200)) if kind == "tokens" else None
    messages = [("user", "a"), ("user", "b")] if kind == "messages" else None
    request = append_request(tokens, text, messages, messages is not None)
    request.name, request.request_id = session.name, "r"
    uploaded = await site.raw.sessions.UploadAppend(chunks(request))
    appended = await session.append(
        request_id="r", text=text, tokens=tokens, messages=messages, add_generation_prompt=messages is not None
    )
    assert (appended.replayed, appended.token_ids) == (True, uploaded.token_ids)


def test_a_client_needs_an_address() -> None:
    with pytest.raises(ValueError, match="address"):
        Wire([])
