"""What the session layer needs from outside, beside the store's and the engine's ports."""

from collections.abc import Sequence
from typing import Protocol


class TextCodec(Protocol):
    """Text to token ids and back. Control ids come only from `render_messages`' template, never from text."""

    def encode_text(self, text: bytes) -> list[int]:
        """Token ids of UTF-8 text, tokenised alone. Raises NotUtf8Error."""
        ...

    def render_messages(self, messages: Sequence[tuple[str, bytes]], add_generation_prompt: bool) -> list[int]:
        """Token ids of chat messages (role, UTF-8 text). Raises NotUtf8Error, InvalidFieldError (unknown role)."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The text bytes of one token; b"" for control tokens."""
        ...
