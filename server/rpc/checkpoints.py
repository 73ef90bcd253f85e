"""CheckpointService."""

from collections.abc import AsyncIterator
from typing import Any

from forkpoint.clock import Clock
from forkpoint.errors import InvalidFieldError
from forkpoint.ids import SessionName, check_id
from forkpoint.proto.forkpoint.v1 import checkpoint_pb2 as pb
from forkpoint.proto.forkpoint.v1.checkpoint_pb2_grpc import CheckpointServiceServicer
from forkpoint.server.rpc import requests, responses
from forkpoint.server.rpc.identity import request_key
from forkpoint.server.rpc.paging import cut_page, page_size, page_start
from forkpoint.server.rpc.stream import closed_after
from forkpoint.server.session.api import SessionNode


def parse_checkpoint(text: str) -> tuple[SessionName, str]:
    """Session and id in `workflows/{w}/sessions/{s}/checkpoints/{c}`; raises InvalidFieldError."""
    session, separator, checkpoint = text.partition("/checkpoints/")
    if not separator:
        raise InvalidFieldError("name", f"{text!r} is no checkpoint name: expected SESSION/checkpoints/C")
    return SessionName.parse(session), check_id(checkpoint, "name")


def page_key(checkpoint: pb.Checkpoint) -> str:
    """Sorts as checkpoints are listed: by position, then name."""
    return f"{checkpoint.position:020d} {checkpoint.name}"


class Checkpoints(CheckpointServiceServicer):
    """Converts, calls the session layer, converts back."""

    def __init__(self, node: SessionNode, clock: Clock) -> None:
        self._node = node
        self._clock = clock

    async def CreateCheckpoint(self, request: pb.CreateCheckpointRequest, context: Any) -> pb.Checkpoint:
        name = SessionName.parse(request.parent, "parent")
        checkpoint = requests.child_id(request.checkpoint_id, "checkpoint_id", "c")
        key = request_key(request, name.workflow, request.request_id)
        expire_us = requests.expire_us(request, "", self._clock)
        return responses.checkpoint(await self._node.create_checkpoint(name, checkpoint, key, expire_us))

    async def GetCheckpoint(self, request: pb.GetCheckpointRequest, context: Any) -> pb.Checkpoint:
        name, checkpoint = parse_checkpoint(request.name)
        return responses.checkpoint(await self._node.get_checkpoint(name, checkpoint))

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Any) -> pb.ListCheckpointsResponse:
        name = SessionName.parse(request.parent, "parent")
        listing = f"checkpoints of {name}"
        after = page_start(request.page_token, listing)
        size = page_size(request.page_size)
        rows = sorted((responses.checkpoint(view) for view in await self._node.list_checkpoints(name)), key=page_key)
        page, token = cut_page((row for row in rows if page_key(row) > after), size, page_key, listing)
        return pb.ListCheckpointsResponse(checkpoints=page, next_page_token=token)

    async def DeleteCheckpoint(self, request: pb.DeleteCheckpointRequest, context: Any) -> pb.Checkpoint:
        name, checkpoint = parse_checkpoint(request.name)
        key = request_key(request, name.workflow, request.request_id)
        return responses.checkpoint(await self._node.delete_checkpoint(name, checkpoint, key))

    async def VerifyCheckpoint(
        self, request: pb.VerifyCheckpointRequest, context: Any
    ) -> AsyncIterator[pb.VerifyProgress]:
        name, checkpoint = parse_checkpoint(request.name)
        checked = damaged = size = 0
        async with closed_after(self._node.verify_checkpoint(name, checkpoint)) as parts:
            async for verified in parts:
                checked += 1
                damaged += bool(verified.problem)
                size += verified.part.bytes
                part = pb.VerifiedPart(part=responses.checkpoint_part(verified.part), problem=verified.problem)
                yield pb.VerifyProgress(part=part)
        result = pb.VerifyResult(parts_checked=checked, parts_damaged=damaged, bytes_checked=size)
        yield pb.VerifyProgress(result=result)
