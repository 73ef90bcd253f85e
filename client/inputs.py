"""Inputs of appends and generations as messages, and large ones in chunks."""

from collections.abc import Iterator, Sequence
from typing import Final

from forkpoint.limits import APPEND_TEXT_BYTES_MAX
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.proto.forkpoint.v1.common_pb2 import ChatMessage, ChatMessages, TokenIds

CHUNK_BYTES: Final = 256 * 1024
CHUNK_TOKENS: Final = 64 * 1024

Messages = Sequence[tuple[str, str | bytes]]
"""Turns of a chat: (role, text)."""


def utf8(text: str | bytes) -> bytes:
    """Text as bytes."""
    return text.encode() if isinstance(text, str) else text


def append_request(
    tokens: Sequence[int] | None,
    text: str | bytes | None,
    messages: Messages | None,
    add_generation_prompt: bool,
) -> pb.AppendRequest:
    """An AppendRequest with at most one input. Raises ValueError for more."""
    if sum(value is not None for value in (tokens, text, messages)) > 1:
        raise ValueError("give one of tokens, text and messages")
    if add_generation_prompt and messages is None:
        raise ValueError("add_generation_prompt goes with messages")
    request = pb.AppendRequest()
    if tokens is not None:
        request.tokens.CopyFrom(TokenIds(ids=tokens))
    elif text is not None:
        request.text_utf8 = utf8(text)
    elif messages is not None:
        turns = [ChatMessage(role=role, text_utf8=utf8(content)) for role, content in messages]
        request.messages.CopyFrom(ChatMessages(messages=turns, add_generation_prompt=add_generation_prompt))
    return request


def is_large(request: pb.AppendRequest) -> bool:
    """Whether an append must be uploaded in chunks."""
    return len(request.text_utf8) > APPEND_TEXT_BYTES_MAX or request.ByteSize() > 2 * APPEND_TEXT_BYTES_MAX


def chunks(request: pb.AppendRequest) -> Iterator[pb.AppendChunk]:
    """The chunks of UploadAppend."""
    header = pb.AppendRequest()
    header.CopyFrom(request)
    kind = request.WhichOneof("input")
    if kind is not None:
        header.ClearField(kind)
    yield pb.AppendChunk(header=header)
    if kind == "text_utf8":
        for start in range(0, len(request.text_utf8), CHUNK_BYTES):
            yield pb.AppendChunk(text_utf8=request.text_utf8[start : start + CHUNK_BYTES])
    elif kind == "tokens":
        for start in range(0, len(request.tokens.ids), CHUNK_TOKENS):
            yield pb.AppendChunk(tokens=TokenIds(ids=request.tokens.ids[start : start + CHUNK_TOKENS]))
    elif kind == "messages":
        for turn in request.messages.messages:
            yield pb.AppendChunk(messages=ChatMessages(messages=[turn]))
        if request.messages.add_generation_prompt:
            yield pb.AppendChunk(messages=ChatMessages(add_generation_prompt=True))
