"""Small vocabularies in the published files' form: every byte, a few merges, and either model's control tokens."""

import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

from forkpoint.model.text.added_tokens import AddedToken
from forkpoint.model.text.tiktoken_tokenizer import TiktokenTokenizer

MERGES = (
    *(b" t", b"he", b"in", b" the", b"er", b"on", b'="', b'."', b" role", b"message", b"assistant", b"think", b"user"),
    *(b"<|", b"|>", b"im", b"<|im", b"end", b"\n\n", b"response", b"system", b"middle", b"open", b"sep"),
    *("é".encode(), "🙂".encode()[:2], "🙂".encode()[2:], "你".encode(), "好".encode()[:2], b"'s"),
)
TOKENS = (*(bytes([value]) for value in range(256)), *MERGES)
"""Bytes by rank."""
FIRST = len(TOKENS)
"""The first control id."""
K3 = dict(
    [
        *[(0, ("[BOS]", True)), (1, ("[EOS]", True)), (2, ("<|end_of_msg|>", True)), (3, ("<|open|>", False))],
        *[(4, ("<|close|>", False)), (5, ("<|sep|>", False)), (254, ("[UNK]", True))],
    ]
)
KIMI_LINEAR = dict(
    [
        *[(0, ("[BOS]", True)), (1, ("[EOS]", True)), (2, ("<|im_end|>", True)), (3, ("<|im_user|>", True))],
        *[(4, ("<|im_assistant|>", True)), (10, ("<|im_system|>", True)), (17, ("<|im_middle|>", True))],
        *[(11, ("<|tool_calls_section_begin|>", False)), (255, ("[PAD]", True))],
    ]
)
"""Published control tokens, as far as they matter here: place above the ranks -> (name, whether special)."""


def added(control: Mapping[int, tuple[str, bool]], first: int = FIRST) -> dict[int, AddedToken]:
    """Control tokens by id."""
    return {first + place: AddedToken(*entry) for place, entry in control.items()}


def tokenizer_of(control: Mapping[int, tuple[str, bool]], tokens: Sequence[bytes] = TOKENS) -> TiktokenTokenizer:
    """A tokenizer that is in no folder."""
    return TiktokenTokenizer(tokens, added(control, len(tokens)))


def write_tiktoken(
    folder: Path, control: Mapping[int, tuple[str, bool]], tokens: Sequence[bytes] = TOKENS, **fields: object
) -> Path:
    """`tiktoken.model` and `tokenizer_config.json` (with `fields` besides); returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    decoder = {
        str(token_id): {"content": token.content, "special": token.special}
        for token_id, token in added(control, len(tokens)).items()
    }
    raw = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": decoder} | fields
    (folder / "tokenizer_config.json").write_text(json.dumps(raw))
    return folder


PUBLISHED_RANKS = {
    1: b'"',
    878: b'="',
    2778: b"message",
    6244: b" role",
    39964: b"think",
    69702: b"assistant",
}
"""Ranks of the real vocabulary that a public report of K3's prompts names (specification, section 7)."""
PUBLISHED_SIZE = 163_584


def published_size_tokens() -> list[bytes]:
    """As many ranks as the published vocabularies have, with PUBLISHED_RANKS and every byte among them; the others are
    no text, so that nothing is encoded to them."""
    fixed = {token: rank for rank, token in PUBLISHED_RANKS.items()}
    free = iter([token for token in TOKENS if token not in fixed])
    filler = (b"\xff\xfe" + number.to_bytes(3, "big") for number in range(PUBLISHED_SIZE))
    return [PUBLISHED_RANKS.get(rank) or next(free, None) or next(filler) for rank in range(PUBLISHED_SIZE)]
