"""UploadAppend: a header and parts become one AppendRequest, so that it is the same call as a unary Append."""

from collections.abc import AsyncIterator

from forkpoint.errors import InvalidFieldError
from forkpoint.limits import INPUT_TOKENS_MAX, TEXT_BYTES_MAX
from forkpoint.proto.forkpoint.v1.session_service_pb2 import AppendChunk, AppendRequest


async def assemble(chunks: AsyncIterator[AppendChunk]) -> AppendRequest:
    """The whole request. Raises InvalidFieldError: no header first, parts of two kinds, or more than the limits."""
    request: AppendRequest | None = None
    kinds = set[str]()
    text = bytearray()
    async for chunk in chunks:
        kind = chunk.WhichOneof("part")
        if request is None:
            if kind != "header":
                raise InvalidFieldError("header", "must be the first chunk")
            request = AppendRequest()
            request.CopyFrom(chunk.header)
            continue
        if kind is None or kind == "header":
            raise InvalidFieldError("header" if kind else "part", "only the first chunk is a header")
        kinds.add(kind)
        if len(kinds) > 1:
            raise InvalidFieldError("part", f"parts of two kinds: {', '.join(sorted(kinds))}")
        if kind == "text_utf8":
            text += chunk.text_utf8
        elif kind == "tokens":
            request.tokens.SetInParent()
            request.tokens.ids.extend(chunk.tokens.ids)
        else:
            request.messages.MergeFrom(chunk.messages)
            text += b"".join(turn.text_utf8 for turn in chunk.messages.messages)
        if len(text) > TEXT_BYTES_MAX:
            raise InvalidFieldError("text_utf8", f"more than {TEXT_BYTES_MAX} bytes")
        if len(request.tokens.ids) > INPUT_TOKENS_MAX:
            raise InvalidFieldError("tokens", f"more than {INPUT_TOKENS_MAX} tokens")
    if request is None:
        raise InvalidFieldError("header", "must be the first chunk")
    if kinds == {"text_utf8"}:
        request.text_utf8 = bytes(text)
    return request
