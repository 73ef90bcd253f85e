"""Request ids: which call is the same call."""

import hashlib
from typing import Any, Final

from google.protobuf.message import Message

from forkpoint.errors import InvalidFieldError
from forkpoint.limits import REQUEST_ID_BYTES_MAX
from forkpoint.proto.forkpoint.v1.session_service_pb2 import GenerateRequest
from forkpoint.statestore.records import RequestKey

CALLER: Final = "anonymous"
"""Until callers authenticate, all are one."""
_NO_CONTENT: Final = frozenset({"request_id", "resume_position", "cancel_on_disconnect"})
"""Fields that don't change what a call is."""
_EMPTY_IS_UNSET: Final = frozenset({"input", "sampling", "session", "workflow"})
"""Message fields that say the same when they are empty as when they are not there."""


def content_digest(*messages: Message) -> bytes:
    """Digest of what a call asks for: kinds and fields of its messages, less the request id and how its answer is read
    (resume position, disconnect policy). 32 bytes."""
    digest = hashlib.blake2b(digest_size=32)
    for message in messages:
        content: Any = type(message)()
        content.CopyFrom(message)
        known = set(content.DESCRIPTOR.fields_by_name)
        for field in _NO_CONTENT & known:
            content.ClearField(field)
        if isinstance(message, GenerateRequest):
            content.input.ClearField("name")
        for field in _EMPTY_IS_UNSET & known:
            value = getattr(content, field)
            if isinstance(value, Message) and not value.ListFields():
                content.ClearField(field)
        data = content.SerializeToString(deterministic=True)
        digest.update(f"{message.DESCRIPTOR.full_name} {len(data)} ".encode() + data)
    return digest.digest()


def request_key(request: Message, workflow: str, request_id: str, *more: Message) -> RequestKey | None:
    """The key of a mutating call; None when it has no request id: then a repeated call is a second call.
    `more`: what belongs to the call's content beside `request`."""
    if not request_id:
        return None
    size = len(request_id.encode())
    if size > REQUEST_ID_BYTES_MAX:
        raise InvalidFieldError("request_id", f"{size} bytes, at most {REQUEST_ID_BYTES_MAX} are kept")
    return RequestKey(CALLER, workflow, request_id, content_digest(request, *more))
