"""Tokenizer: text to token ids and back, and chat turns whose control ids never come from text."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, Self

from forkpoint.errors import InvalidFieldError, NotUtf8Error, TokenOutOfRangeError
from forkpoint.limits import DIGEST_BYTES
from forkpoint.model.config import ModelConfigError

CONFIG_FILE: Final = "tokenizer_config.json"
BYTE_VALUES: Final = 256


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
        """The text bytes of ids; control ids give none. Concatenates: decode(a + b) = decode(a) + decode(b), so a
        stream may decode token by token, and a piece may end inside a character. Raises TokenOutOfRangeError."""
        ...

    def render_messages(self, messages: Sequence[tuple[str, bytes]], add_generation_prompt: bool) -> list[int]:
        """Ids of chat turns (role, text); with `add_generation_prompt` the assistant's turn is opened at the end.
        Raises InvalidFieldError for an unknown role, NotUtf8Error for text that is not UTF-8."""
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
        path = Path(folder) / CONFIG_FILE
        try:
            raw: Any = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelConfigError(CONFIG_FILE, str(folder), error.strerror or str(error)) from error
        except ValueError as error:
            raise ModelConfigError(CONFIG_FILE, str(folder), f"is not JSON: {error}") from error
        name = raw.get("tokenizer_class") if isinstance(raw, dict) else None
        if name != cls.__name__:
            raise ModelConfigError("tokenizer_class", str(path), f"{name!r} is not supported, only {cls.__name__!r} is")
        try:
            control = {int(token_id): str(entry["content"]) for token_id, entry in raw["added_tokens_decoder"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ModelConfigError("added_tokens_decoder", str(path), "does not map ids to contents") from error
        return cls(control, str(path))

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

    def render_messages(self, messages: Sequence[tuple[str, bytes]], add_generation_prompt: bool) -> list[int]:
        ids: list[int] = []
        for index, (role, text) in enumerate(messages):
            ids.append(self._role_id(role, f"messages[{index}].role"))
            ids += self.encode(text, f"messages[{index}].text")
            ids.append(self._end)
        if add_generation_prompt:
            ids.append(self._ids["<|assistant|>"])
        return ids

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


ROLES: Final = ("system", "user", "assistant", "tool")
"""Roles of chat turns. A closed list: control tokens such as `<|end|>` are no roles."""


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a model folder. Raises ModelConfigError for a kind that this version does not have."""
    return ByteTokenizer.from_folder(folder)
