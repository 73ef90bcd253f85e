"""Calls at the bounds of what a message holds: at the limit they work whole, above it they do nothing."""

from pathlib import Path

import grpc
import pytest

from forkpoint.limits import APPEND_TEXT_BYTES_MAX, MESSAGE_BYTES_MAX
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from tests.support.hash_engine import HashEngine
from tests.support.rpc_site import Refusal, Served, served

LIMIT = APPEND_TEXT_BYTES_MAX


@pytest.mark.parametrize("size", [LIMIT - 1, LIMIT])
async def test_the_largest_unary_append_is_answered_with_all_its_ids(tmp_path: Path, size: int) -> None:
    async with served(tmp_path, HashEngine(slots=1, pages=1 << 20, context_limit=1 << 22)) as site:
        session = await site.session()
        answer = await session.append(text=b"\xc3\xa9" * (size // 2) + b"x" * (size % 2))
        assert (answer.head, len(answer.token_ids)) == (size, size)


async def test_a_larger_one_goes_through_upload_and_the_client_knows(site: Served) -> None:
    session = await site.session()
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
        await site.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x" * (LIMIT + 1)))
    assert (await session.get()).head == 0


async def test_a_message_above_grpcs_limit_has_no_effect(site: Served) -> None:
    session = await site.session()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await site.raw.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"x" * MESSAGE_BYTES_MAX))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert (await session.get()).head == 0
