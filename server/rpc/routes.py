"""Which calls a node sends on, and how such a call looks."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from google.protobuf import descriptor_pool, message_factory
from google.protobuf.message import Message

from forkpoint.ids import new_id
from forkpoint.proto.forkpoint.v1.session_service_pb2 import AppendChunk, GenerateRequest
from forkpoint.server.rpc.fields import HONOURED

FORWARDED: Final = "forkpoint-forwarded"
"""Metadata of a call that a node sent on: the sender's name. Who gets it answers by itself."""
DIRECT: Final = "forkpoint-direct"
"""Metadata of a client that goes to the owner itself: its calls are not sent on."""

PUBLIC: Final = "/forkpoint.v1."
_SESSIONS, _CHECKPOINTS = f"{PUBLIC}SessionService/", f"{PUBLIC}CheckpointService/"
_WORKFLOWS, _ADMIN = f"{PUBLIC}WorkflowService/", f"{PUBLIC}AdminService/"
GET_SESSION: Final = f"{_SESSIONS}GetSession"
GENERATE: Final = f"{_SESSIONS}Generate"
READ_TOKENS: Final = f"{_SESSIONS}ReadTokens"
UPLOAD_APPEND: Final = f"{_SESSIONS}UploadAppend"

HERE: Final = frozenset(
    [
        *(f"{_SESSIONS}{name}" for name in ("CreateSession", "ListSessions", "UndeleteSession", "Watch")),
        *(f"{_SESSIONS}{name}" for name in ("Export", "Import")),
        *(f"{_CHECKPOINTS}{name}" for name in ("GetCheckpoint", "ListCheckpoints", "VerifyCheckpoint")),
        *(f"{_WORKFLOWS}{name}Workflow" for name in ("Create", "Get", "Update", "Delete")),
        *(f"{_WORKFLOWS}{name}" for name in ("ListWorkflows", "GetBudget", "UpdateBudget")),
        *(f"{_WORKFLOWS}{name}" for name in ("GetUsage", "ListSessionUsage")),
        *(f"{_ADMIN}{name}" for name in ("ListNodes", "GetNode", "WatchNodes", "CollectGarbage", "ReleaseQuarantine")),
        f"{_ADMIN}Rebalance",
    ]
)
"""What every node answers from the store. Whatever else there is may be another node's: the one that owns the session,
or the one that the call names."""


@dataclass(frozen=True, slots=True)
class Marks:
    """What a call's metadata say: whether a node sent it, and whether it may be sent on."""

    forwarded: bool
    direct: bool

    @classmethod
    def of(cls, metadata: Iterable[tuple[str, Any]] | None) -> "Marks":
        """Of a call's metadata."""
        keys = {key for key, _ in metadata or ()}
        return cls(FORWARDED in keys, DIRECT in keys)


def may_go_on(method: str, marks: Marks) -> bool:
    """Whether a call may be answered by another node. At most one hop: a call that came from a node goes nowhere."""
    return method.startswith(PUBLIC) and method not in HERE and not (marks.forwarded or marks.direct)


def with_request_id(request: Message) -> None:
    """Give a mutating call an id when it has none, so that another try of it is the same call."""
    if isinstance(request, AppendChunk):
        if request.WhichOneof("part") == "header":
            with_request_id(request.header)
        return
    if "request_id" in HONOURED.get(request.DESCRIPTOR.full_name, ()) and not getattr(request, "request_id", ""):
        drawn: Any = request
        drawn.request_id = new_id("g" if isinstance(request, GenerateRequest) else "r")


@cache
def answer_class(method: str) -> type[Message]:
    """The message that a method answers with."""
    service, _, name = method.removeprefix("/").partition("/")
    found = descriptor_pool.Default().FindServiceByName(service).FindMethodByName(name)
    return message_factory.GetMessageClass(found.output_type)
