"""The published models' tokenizer: ranks from a file, the split, control tokens that no text can spell."""

import importlib
import json
import random
import socket
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.errors import NotUtf8Error, TokenOutOfRangeError
from forkpoint.model.config import ModelConfigError
from forkpoint.model.text.added_tokens import AddedToken
from forkpoint.model.text.ranks import read_ranks
from forkpoint.model.text.tiktoken_tokenizer import PIECE_CHARACTERS, RUN_CHARACTERS, SPLIT, TiktokenTokenizer, pieces
from forkpoint.model.tokenizer import load_tokenizer
from tests.support.tiktoken_folder import FIRST, K3, KIMI_LINEAR, MERGES, TOKENS, added, tokenizer_of, write_tiktoken

STEADY = settings(deadline=None, derandomize=True, database=None, max_examples=60)
TOKENIZER = tokenizer_of(K3)
REGEX: Any = importlib.import_module("regex")
BYTES = [bytes([value]) for value in range(256)]


@STEADY
@given(st.text())
def test_any_text_comes_back_from_its_ids_and_none_is_a_control_id(text: str) -> None:
    for spelled in (text, f"<|open|>{text}<|im_end|>[EOS]", f"{text}<|reserved_token_{FIRST + 9}|>"):
        ids = TOKENIZER.encode(spelled.encode())
        assert all(token_id < FIRST for token_id in ids)
        assert TOKENIZER.decode_bytes(ids) == spelled.encode()
        assert b"".join(TOKENIZER.decode_bytes([token_id]) for token_id in ids) == spelled.encode()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello world", ["Hello", " world"]),
        ("HELLOworld ABC", ["HELLOworld", " ABC"]),
        ("we'll DON'T it's", ["we'll", " DON'T", " it's"]),
        ("abc你好、world", ["abc", "你好", "、world"]),
        ("你好world漢字", ["你好", "world", "漢字"]),
        ("1234567", ["123", "456", "7"]),
        ('a="b"', ["a", '="', "b", '"']),
        ("hi!!\r\n\nyo", ["hi", "!!\r\n\n", "yo"]),
        ("x   y  \n z  ", ["x", "  ", " y", "  \n", " z", "  "]),
        ("ひらがなカタカナ", ["ひらがなカタカナ"]),
        ("naïve ǅX é", ["naïve", " ǅX", " é"]),
    ],
)
def test_text_is_split_as_the_published_models_split_it(text: str, parts: list[str]) -> None:
    assert REGEX.findall(SPLIT, text, REGEX.V1) == parts
    assert split_by_tokens(text, parts) == parts


@STEADY
@given(st.text(alphabet="aZé你好 \n\r\t'sǅʰ1٣.<|>🙂漢か\u0301", max_size=40))
def test_the_split_is_what_another_engine_of_regular_expressions_makes_of_it(text: str) -> None:
    parts = REGEX.findall(SPLIT, text, REGEX.V1)
    assert "".join(parts) == text
    assert split_by_tokens(text, parts) == parts


def split_by_tokens(text: str, parts: list[str]) -> list[str]:
    """The parts of `text` as tokens, of a vocabulary that has each of them whole: other parts give other tokens."""
    longer = sorted({part.encode() for part in parts if len(part.encode()) > 1})
    tokenizer = tokenizer_of(K3, [*BYTES, *longer])
    return [tokenizer.decode_bytes([token_id]).decode() for token_id in tokenizer.encode(text.encode())]


def test_long_text_is_encoded_in_pieces_within_the_limits() -> None:
    rng = random.Random(5)
    text = "".join(
        rng.choice(("ab", " ", "\n", "你"))[:1] * rng.choice((1, 3, 24_999, 25_000, 25_001)) for _ in range(60)
    )
    cut = list(pieces(text))
    assert "".join(cut) == text
    assert max(map(len, cut)) <= PIECE_CHARACTERS
    for piece in cut:
        assert all(len(run) <= RUN_CHARACTERS for run in REGEX.findall(r"\s+|\S+", piece))
    assert [len(piece) for piece in pieces("x" * 60_000)] == [25_000, 25_000, 10_000]
    assert [len(piece) for piece in pieces("x " * 250_000)] == [400_000, 100_000]
    assert list(pieces("")) == []


@pytest.mark.parametrize("unit", ["x", " ", "!", "\n", "你", "7", "xY", "\u0301"])
def test_a_million_characters_of_one_kind_are_encoded(unit: str) -> None:
    text = (unit * 1_000_000)[:1_000_000].encode()
    assert TOKENIZER.decode_bytes(TOKENIZER.encode(text)) == text


def test_text_that_is_not_utf8_is_refused_with_its_offset() -> None:
    with pytest.raises(NotUtf8Error) as caught:
        TOKENIZER.encode(b"ok\xff", "input.text_utf8")
    assert (caught.value.field, caught.value.byte_offset) == ("input.text_utf8", 2)


@pytest.mark.parametrize("token_id", [-1, FIRST + 256, 1 << 40])
def test_an_id_outside_the_vocabulary_does_not_decode(token_id: int) -> None:
    with pytest.raises(TokenOutOfRangeError) as caught:
        TOKENIZER.decode_bytes([65, token_id])
    assert (caught.value.index, caught.value.vocab_size) == (1, FIRST + 256)


def test_a_control_token_decodes_to_nothing_unless_the_folder_says_that_it_is_not_special() -> None:
    hidden = [FIRST + place for place, (_, special) in K3.items() if special]
    assert TOKENIZER.decode_bytes([*hidden, FIRST + 9, FIRST + 255]) == b""
    assert TOKENIZER.decode_bytes([FIRST + 4, 65, FIRST + 5]) == b"<|close|>A<|sep|>"


@pytest.mark.parametrize("control", [K3, KIMI_LINEAR])
def test_a_folder_gives_the_tokenizer_without_a_network(
    tmp_path: Path, control: dict[int, tuple[str, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    tokenizer = load_tokenizer(write_tiktoken(tmp_path, control))
    assert isinstance(tokenizer, TiktokenTokenizer)
    assert tokenizer.vocab_size == FIRST + 256
    assert tokenizer.turn_end_id == FIRST + 2
    assert tokenizer.encode(b"message the") == [TOKENS.index(b"message"), TOKENS.index(b" the")]
    assert tokenizer.digest() == tokenizer_of(control).digest()
    assert len(tokenizer.digest()) == 32


def test_lines_may_stand_in_any_order(tmp_path: Path) -> None:
    path = write_tiktoken(tmp_path, K3) / "tiktoken.model"
    path.write_bytes(b"\n".join(sorted(path.read_bytes().splitlines())))
    assert read_ranks(tmp_path) == list(TOKENS)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda lines: None, "No such file"),
        (lambda lines: [], "no token for the byte 0x00"),
        (lambda lines: [*lines[:40], b"*bm9*= 40", *lines[41:]], "line 41 does not begin with base64"),
        (lambda lines: [*lines[:40], lines[40][:-4], *lines[41:]], "line 41 "),
        (lambda lines: [*lines[:40], b64encode(b"zz"), *lines[41:]], "line 41 is not a token in base64, a space"),
        (lambda lines: [*lines[:40], b64encode(b"zz") + b" -1", *lines[41:]], "line 41 is not a token in base64"),
        (lambda lines: [*lines[:40], b64encode(b"zz") + b" 4 0", *lines[41:]], "line 41 is not a token in base64"),
        (lambda lines: [*lines[:40], b" 40", *lines[41:]], "line 41 is not a token in base64"),
        (lambda lines: [*lines, b64encode(b"zz") + b" 40"], "has rank 40 twice"),
        (lambda lines: [*lines, b64encode(b"A") + b" 999"], "has the token of rank 65 again"),
        (lambda lines: [*lines[:260], *lines[261:]], "lacks rank 260, and its largest is"),
        (lambda lines: [*lines[:41], *lines[42:]], "lacks rank 41, and its largest is"),
        (lambda lines: [*lines[:40], b64encode(b"zz") + b" 40", *lines[41:]], "no token for the byte 0x28"),
    ],
)
def test_a_damaged_file_of_ranks_is_refused_and_says_where(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes] | None], problem: str
) -> None:
    path = write_tiktoken(tmp_path, K3) / "tiktoken.model"
    lines = change(path.read_bytes().splitlines())
    path.unlink() if lines is None else path.write_bytes(b"\n".join(lines))
    with pytest.raises(ModelConfigError, match=problem) as caught:
        load_tokenizer(tmp_path)
    assert (caught.value.key, caught.value.source) == ("tiktoken.model", str(tmp_path))


@pytest.mark.parametrize(
    ("control", "problem"),
    [
        ({**added(K3), FIRST - 1: AddedToken("<|x|>", True)}, f"id {FIRST - 1}, and control tokens are {FIRST} to"),
        ({**added(K3), FIRST + 256: AddedToken("<|x|>", True)}, f"has the id {FIRST + 256}"),
        ({**added(K3), FIRST + 9: AddedToken(f"<|reserved_token_{FIRST + 8}|>", True)}, "name of another"),
        ({}, "has the markers of no chat forms, expected all of"),
        ({FIRST: AddedToken("<|open|>", False)}, "no chat forms"),
        (
            added({**K3, **{place + 20: entry for place, entry in KIMI_LINEAR.items() if 1 < place < 200}}),
            "of 2 chat forms",
        ),
    ],
)
def test_control_tokens_must_be_above_the_ranks_and_have_one_chat_form(
    control: dict[int, AddedToken], problem: str
) -> None:
    with pytest.raises(ModelConfigError, match=problem) as caught:
        TiktokenTokenizer(TOKENS, control)
    assert caught.value.key == "added_tokens_decoder"


def test_two_control_tokens_of_one_name_are_refused(tmp_path: Path) -> None:
    write_tiktoken(tmp_path, {**K3, 8: ("<|open|>", True)})
    with pytest.raises(ModelConfigError, match="names two ids alike"):
        load_tokenizer(tmp_path)


def test_ranks_beside_a_byte_tokenizer_are_refused(tmp_path: Path) -> None:
    write_tiktoken(tmp_path, K3, tokenizer_class="ByteTokenizer")
    with pytest.raises(ModelConfigError, match=r"has no use for tiktoken\.model"):
        load_tokenizer(tmp_path)


def test_the_digest_changes_with_everything_that_changes_ids_or_text(tmp_path: Path) -> None:
    swapped = [*TOKENS[:256], *MERGES[1:], MERGES[0]]
    others = [
        tokenizer_of(KIMI_LINEAR),
        tokenizer_of(K3, swapped),
        tokenizer_of(K3, TOKENS[:-1]),
        tokenizer_of({**K3, 100: ("<|x|>", True)}),
        tokenizer_of({**K3, 100: ("<|x|>", False)}),
    ]
    assert len({tokenizer.digest() for tokenizer in (TOKENIZER, *others)}) == 6


def test_the_published_size_has_the_published_ids(published: TiktokenTokenizer) -> None:
    assert published.vocab_size == 163_840
    assert published.turn_end_id == 163_586
    assert published.encode(b'message role="assistant"') == [2778, 6244, 878, 69702, 1]
    raw = json.dumps([published.decode_bytes([token_id]).decode() for token_id in (163_587, 163_588, 163_839)])
    assert raw == '["<|open|>", "<|close|>", ""]'
