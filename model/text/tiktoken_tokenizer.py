"""The published models' tokenizer: byte-pair ranks from `tiktoken.model`, control tokens above them, a chat form."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Self

import tiktoken

from forkpoint.chat import Chat, PromptIds
from forkpoint.errors import NotUtf8Error, TokenOutOfRangeError
from forkpoint.limits import DIGEST_BYTES
from forkpoint.model.text.added_tokens import AddedToken, TokenizerConfig
from forkpoint.model.text.chat import ChatForm, ImForm, XtmlForm
from forkpoint.model.text.ranks import read_ranks

CONTROL_TOKENS: Final = 256
"""Control tokens above the ranks. Kimi Linear's own code makes two more, beyond the ids that its model has."""
_PREFIX: Final = r"[^\r\n\p{L}\p{N}]?"
_UPPER: Final = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT: Final = "|".join(
    (
        r"[\p{Han}]+",
        f"{_PREFIX}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_PREFIX}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""How text is cut before pairs are merged; both published models have it."""
PIECE_CHARACTERS: Final = 400_000
RUN_CHARACTERS: Final = 25_000
"""Text is encoded in pieces: at most so many characters in one, and so many of white space, or of anything else, in a
row. Beyond, the regular expression overflows its stack and merging takes quadratic time."""
_RUN: Final = re.compile(r"\s+|\S+")
FORMS: Final[tuple[type[ImForm] | type[XtmlForm], ...]] = (XtmlForm, ImForm)


class TiktokenTokenizer:
    """Ids below the number of ranks are byte strings; the 256 from there on are control tokens by name.

    Which chat form it has is decided by the control tokens that there are: `<|open|>` and its kin are K3's,
    `<|im_middle|>` and its kin Kimi Linear's. A control token decodes to nothing, unless `tokenizer_config.json` says
    `"special": false`: K3's elements and Kimi Linear's tool calls are read from the text.
    """

    def __init__(self, tokens: Sequence[bytes], added: Mapping[int, AddedToken], source: str = "tokenizer") -> None:
        """`tokens`: bytes by rank, every single byte among them. `added`: control tokens by id; the others get names
        that no text form uses. Raises ModelConfigError naming `source`."""
        config = TokenizerConfig(source, None, {})
        first, end = len(tokens), len(tokens) + CONTROL_TOKENS
        for token_id in added:
            if not first <= token_id < end:
                raise config.error(f"has the id {token_id}, and control tokens are {first} to {end - 1}")
        control = {i: added.get(i, AddedToken(f"<|reserved_token_{i}|>", True)) for i in range(first, end)}
        ids = {token.content: token_id for token_id, token in control.items()}
        if len(ids) < len(control):
            raise config.error("gives an id the name of another that is reserved")
        forms = [form for form in FORMS if set(form.markers) <= set(ids)]
        if len(forms) != 1:
            wanted = " or ".join(f"all of {', '.join(form.markers)}" for form in FORMS)
            raise config.error(f"has the markers of {len(forms) or 'no'} chat forms, expected {wanted}")
        self._tokens = [*tokens, *(b"" if token.special else token.content.encode() for token in control.values())]
        self._control = control
        self._form: ChatForm = forms[0](ids, self.encode)
        # No control token is given to the encoder, so no text can spell one.
        ranks = {token: rank for rank, token in enumerate(tokens)}
        self._encoding = tiktoken.Encoding("forkpoint", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={})

    @classmethod
    def from_folder(cls, folder: Path | str) -> Self:
        """Read `tiktoken.model` and `tokenizer_config.json`; raises ModelConfigError."""
        config = TokenizerConfig.from_folder(folder)
        return cls(read_ranks(folder), config.added_tokens(), config.source)

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    @property
    def turn_end_id(self) -> int:
        return self._form.turn_end_id

    def encode(self, text: bytes, field: str = "text_utf8") -> list[int]:
        try:
            characters = text.decode()
        except UnicodeDecodeError as error:
            raise NotUtf8Error(field, error.start) from error
        ids: list[int] = []
        for piece in pieces(characters):
            ids += self._encoding.encode_ordinary(piece)
        return ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        out = bytearray()
        for index, token_id in enumerate(ids):
            if not 0 <= token_id < len(self._tokens):
                raise TokenOutOfRangeError(token_id, index, len(self._tokens))
            out += self._tokens[token_id]
        return bytes(out)

    def render_chat(self, chat: Chat) -> PromptIds:
        return self._form.render(chat)

    def digest(self) -> bytes:
        control = [[token_id, token.content, token.special] for token_id, token in self._control.items()]
        content = ["TiktokenTokenizer", SPLIT, PIECE_CHARACTERS, RUN_CHARACTERS, self._form.wording, control]
        digest = hashlib.blake2b(json.dumps(content).encode(), digest_size=DIGEST_BYTES)
        for token in self._tokens[: -len(self._control)]:
            digest.update(len(token).to_bytes(4, "little") + token)
        return digest.digest()


def pieces(text: str) -> Iterator[str]:
    """Parts of `text` in order: at most PIECE_CHARACTERS each, with at most RUN_CHARACTERS of one kind in a row."""
    for start in range(0, len(text), PIECE_CHARACTERS):
        block, cut = text[start : start + PIECE_CHARACTERS], 0
        if len(block) > RUN_CHARACTERS:
            for run in _RUN.finditer(block):
                for at in range(run.start() + RUN_CHARACTERS, run.end(), RUN_CHARACTERS):
                    yield block[cut:at]
                    cut = at
        yield block[cut:]
