"""Tokenizer: text to token ids and back, and chat turns whose control ids never come from text."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, Self

from forkpoint.chat import Chat, PromptIds
from forkpoint.errors import InvalidFieldError, NotUtf8Error, TokenOutOfRangeError
from forkpoint.limits import DIGEST_BYTES
from forkpoint.model.config_fields import ModelConfigError
from forkpoint.model.text.added_tokens import TokenizerConfig
from forkpoint.model.text.chat import ROLES, refuse_thinking
from forkpoint.model.text.ranks import BYTE_VALUES, RANKS_FILE


class Tokenizer(Protocol):
    """What the service asks of a tokenizer. All methods are pure functions."""

    @property
    def vocab_size(self) -> int:
        """Ids are 0 to vocab_size - 1; ids that name nothing decode to no bytes."""
        ...

    def encode(self, text: bytes, field: str = "text_utf8") -> list[int]:
        """Ids of UTF-8 text, tokenised alone, never control ids. Raises NotUtf8Error naming `field`."""
        ...

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The text bytes of ids; control ids give none, except those that the model's text form is read by.
        Concatenates: decode(a + b) = decode(a) + decode(b), so a stream may decode token by token, and a piece may end
        inside a character. Raises TokenOutOfRangeError."""
        ...

    def render_chat(self, chat: Chat) -> PromptIds:
        """Ids of a chat in the model's form. Raises InvalidFieldError for what the form does not have (an unknown role,
        thinking), NotUtf8Error for text that is not UTF-8."""
        ...

    @property
    def turn_end_id(self) -> int:
        """The control id that ends a turn of a chat."""
        ...

    def digest(self) -> bytes:
        """32 bytes that change with anything that changes ids."""
        ...


class ByteTokenizer:
    """Ids 0-255 are bytes; the ids from 256 up are control tokens by name.

    A turn is `<|ROLE|>` TEXT `<|end|>`; a role exists when its control token does.
    """

    def __init__(self, control: Mapping[int, str], source: str = "tokenizer") -> None:
        """`control`: names by id, all ids >= 256. Raises ModelConfigError naming `source`."""
        if any(token_id < BYTE_VALUES for token_id in control):
            raise ModelConfigError("added_tokens_decoder", source, f"has an id below {BYTE_VALUES}, which is a byte's")
        self._ids = {name: token_id for token_id, name in control.items()}
        if len(self._ids) != len(control):
            raise ModelConfigError("added_tokens_decoder", source, "names two ids alike")
        if missing := sorted({"<|assistant|>", "<|end|>"} - set(self._ids)):
            raise ModelConfigError("added_tokens_decoder", source, f"lacks {missing[0]}")
        self._control = dict(sorted(control.items()))
        self._end = self._ids["<|end|>"]

    @classmethod
    def from_folder(cls, folder: Path | str) -> Self:
        """Read `tokenizer_config.json` of a model folder; raises ModelConfigError."""
        config = TokenizerConfig.from_folder(folder)
        return cls({token_id: token.content for token_id, token in config.added_tokens().items()}, config.source)

    @property
    def vocab_size(self) -> int:
        return max(self._control) + 1

    def encode(self, text: bytes, field: str = "text_utf8") -> list[int]:
        try:
            text.decode()
        except UnicodeDecodeError as error:
            raise NotUtf8Error(field, error.start) from error
        return list(text)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        out = bytearray()
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < self.vocab_size:
                raise TokenOutOfRangeError(token_id, index, self.vocab_size)
            if token_id < BYTE_VALUES:
                out.append(token_id)
        return bytes(out)

    def render_chat(self, chat: Chat) -> PromptIds:
        refuse_thinking(chat)
        ids: list[int] = []
        for index, turn in enumerate(chat.turns):
            if turn.name:
                raise InvalidFieldError(f"messages[{index}].name", "turns of this model have no names")
            ids.append(self._role_id(turn.role, f"messages[{index}].role"))
            ids += self.encode(turn.text, f"messages[{index}].text")
            ids.append(self._end)
        if chat.add_generation_prompt:
            ids.append(self._ids["<|assistant|>"])
        return PromptIds(tuple(ids))

    @property
    def turn_end_id(self) -> int:
        return self._end

    def digest(self) -> bytes:
        content = ["ByteTokenizer", [[token_id, name] for token_id, name in self._control.items()]]
        return hashlib.blake2b(json.dumps(content).encode(), digest_size=DIGEST_BYTES).digest()

    def _role_id(self, role: str, field: str) -> int:
        if role not in ROLES or (token_id := self._ids.get(f"<|{role}|>")) is None:
            known = [name for name in ROLES if f"<|{name}|>" in self._ids]
            raise InvalidFieldError(field, f"{role!r} is no role of this model, expected one of {known}")
        return token_id


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a model folder, by its `tokenizer_class`: `TikTokenTokenizer`, as the published models have, or
    `ByteTokenizer`. Raises ModelConfigError for any other, and for a folder that has both kinds' files."""
    config = TokenizerConfig.from_folder(folder)
    if config.tokenizer_class == "TikTokenTokenizer":
        # Only such a folder needs the library: other models run where it is not installed.
        from forkpoint.model.text.tiktoken_tokenizer import TiktokenTokenizer

        return TiktokenTokenizer.from_folder(folder)
    if config.tokenizer_class != ByteTokenizer.__name__:
        problem = f"{config.tokenizer_class!r} is neither 'TikTokenTokenizer' nor {ByteTokenizer.__name__!r}"
        raise ModelConfigError("tokenizer_class", config.source, problem)
    if (Path(folder) / RANKS_FILE).exists():
        raise ModelConfigError("tokenizer_class", config.source, f"'ByteTokenizer' has no use for {RANKS_FILE}")
    return ByteTokenizer.from_folder(folder)
