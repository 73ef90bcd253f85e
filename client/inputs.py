"""Inputs of appends and generations as messages, and large ones in chunks."""

from collections.abc import Iterator, Sequence
from typing import Final

from forkpoint.limits import APPEND_TEXT_BYTES_MAX
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.proto.forkpoint.v1.common_pb2 import ChatMessage, ChatMessages, TokenIds

CHUNK_BYTES: Final = 256 * 1024
CHUNK_TOKENS: Final = 64 * 1024

Messages = Sequence[tuple[str, str | bytes] | tuple[str, str | bytes, str]]
"""Turns of a chat: (role, text), or (role, text, name)."""


def utf8(text: str | bytes) -> bytes:
    """Text as bytes."""
    return text.encode() if isinstance(text, str) else text


def append_request(
    tokens: Sequence[int] | None,
    text: str | bytes | None,
    messages: Messages | None,
    add_generation_prompt: bool,
    thinking: bool | None = None,
    thinking_effort: str = "",
) -> pb.AppendRequest:
    """An AppendRequest with at most one input. Raises ValueError for more."""
    if sum(value is not None for value in (tokens, text, messages)) > 1:
        raise ValueError("give one of tokens, text and messages")
    if messages is None and (add_generation_prompt or thinking is not None or thinking_effort):
        raise ValueError("add_generation_prompt, thinking and thinking_effort go with messages")
    request = pb.AppendRequest()
    if tokens is not None:
        request.tokens.CopyFrom(TokenIds(ids=tokens))
    elif text is not None:
        request.text_utf8 = utf8(text)
    elif messages is not None:
        request.messages.CopyFrom(
            ChatMessages(
                messages=[
                    ChatMessage(role=turn[0], text_utf8=utf8(turn[1]), name="".join(turn[2:])) for turn in messages
                ],
                add_generation_prompt=add_generation_prompt,
                thinking=thinking,
                thinking_effort=thinking_effort,
            )
        )
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
        rest = ChatMessages()
        rest.CopyFrom(request.messages)
        rest.ClearField("messages")
        if rest.ListFields():
            yield pb.AppendChunk(messages=rest)
