"""Request ids: which call is the same call."""

import hashlib
from typing import Final

from google.protobuf.message import Message

from forkpoint.errors import InvalidFieldError
from forkpoint.limits import REQUEST_ID_BYTES_MAX
from forkpoint.proto.forkpoint.v1.session_service_pb2 import AppendRequest, GenerateRequest
from forkpoint.statestore.records import RequestKey

CALLER: Final = "anonymous"
"""Until callers authenticate, all are one."""


def content_digest(request: Message) -> bytes:
    """Digest of what a call asks for: its kind and its fields, less the request id and how its answer is read
    (resume position, disconnect policy). 32 bytes."""
    content = type(request)()
    content.CopyFrom(request)
    content.ClearField("request_id")
    if isinstance(content, GenerateRequest):
        content.ClearField("resume_position")
        content.ClearField("cancel_on_disconnect")
        content.input.ClearField("name")
        if content.input == AppendRequest():
            content.ClearField("input")
    digest = hashlib.blake2b(digest_size=32)
    digest.update(request.DESCRIPTOR.full_name.encode() + b"\0")
    digest.update(content.SerializeToString(deterministic=True))
    return digest.digest()


def request_key(request: Message, workflow: str, request_id: str) -> RequestKey | None:
    """The key of a mutating call; None when it has no request id: then a repeated call is a second call."""
    if not request_id:
        return None
    size = len(request_id.encode())
    if size > REQUEST_ID_BYTES_MAX:
        raise InvalidFieldError("request_id", f"{size} bytes, at most {REQUEST_ID_BYTES_MAX} are kept")
    return RequestKey(CALLER, workflow, request_id, content_digest(request))
