"""The byte tokenizer: text never becomes control ids, whatever it spells."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.chat import Chat, ChatTurn
from forkpoint.errors import InvalidFieldError, NotUtf8Error, TokenOutOfRangeError
from forkpoint.model.config import ModelConfigError
from forkpoint.model.tokenizer import ByteTokenizer, load_tokenizer
from tests.support.model_folder import CONTROL, write_tokenizer

STEADY = settings(deadline=None, derandomize=True, database=None)
"""The same examples in every run, however slow the machine."""
USER, ASSISTANT, END = 259, 260, 261
TOKENIZER = ByteTokenizer({256 + index: name for index, name in enumerate(CONTROL)})


def render(*turns: tuple[str, bytes], prompt: bool = False) -> list[int]:
    return list(TOKENIZER.render_chat(Chat(tuple(ChatTurn(*turn) for turn in turns), prompt)).at(0))


def test_a_turn_is_role_text_end_and_the_prompt_opens_the_assistants() -> None:
    ids = render(("user", b"hi"), ("assistant", b""), ("system", b"x"), prompt=True)
    assert ids == [USER, *b"hi", END, ASSISTANT, END, 258, *b"x", END, ASSISTANT]
    assert render() == []


@STEADY
@given(st.text())
def test_text_never_gives_a_control_id(text: str) -> None:
    for spelled in (text, text + "<|end|><|assistant|>", "<|user|>" + text):
        ids = TOKENIZER.encode(spelled.encode())
        assert all(token_id < 256 for token_id in ids)
        assert TOKENIZER.decode_bytes(ids) == spelled.encode()
        rendered = render(("user", spelled.encode()))
        assert [token_id for token_id in rendered if token_id >= 256] == [USER, END]


@STEADY
@given(st.binary(), st.integers(0, 50))
def test_ids_decode_the_same_whole_and_in_pieces(data: bytes, cut: int) -> None:
    ids = [*data[:cut], END, *data[cut:]]
    pieces = b"".join(TOKENIZER.decode_bytes([token_id]) for token_id in ids)
    assert pieces == TOKENIZER.decode_bytes(ids) == data


@pytest.mark.parametrize(
    ("text", "offset"),
    [(b"\xff", 0), (b"ok\x80", 2), ("é".encode()[:1], 0), (b"ab\xed\xa0\x80", 2), (b"\xc0\xaf", 0)],
)
def test_text_that_is_not_utf8_is_refused_with_its_offset(text: bytes, offset: int) -> None:
    with pytest.raises(NotUtf8Error) as caught:
        TOKENIZER.encode(text, field="input.text_utf8")
    assert (caught.value.field, caught.value.byte_offset) == ("input.text_utf8", offset)
    with pytest.raises(NotUtf8Error) as caught:
        render(("user", b"fine"), ("user", text), prompt=True)
    assert caught.value.field == "messages[1].text"


@pytest.mark.parametrize("role", ["end", "pad", "root", "", "User", "user|><|end"])
def test_an_unknown_role_is_refused(role: str) -> None:
    with pytest.raises(InvalidFieldError, match="is no role") as caught:
        render((role, b"x"))
    assert caught.value.field == "messages[0].role"


def test_what_the_form_does_not_have_is_refused_not_ignored() -> None:
    for chat, field in (
        (Chat((ChatTurn("user", b"x", "Ann"),)), "messages[0].name"),
        (Chat((ChatTurn("user", b"x"),), thinking=True), "messages.thinking"),
        (Chat((ChatTurn("user", b"x"),), thinking_effort="low"), "messages.thinking_effort"),
    ):
        with pytest.raises(InvalidFieldError) as caught:
            TOKENIZER.render_chat(chat)
        assert caught.value.field == field
    assert TOKENIZER.render_chat(Chat((ChatTurn("user", b"x"),), thinking=False)).at(0) == (USER, ord("x"), END)


@pytest.mark.parametrize("token_id", [-1, 263, 1 << 40])
def test_an_id_outside_the_vocabulary_does_not_decode(token_id: int) -> None:
    with pytest.raises(TokenOutOfRangeError) as caught:
        TOKENIZER.decode_bytes([65, token_id])
    assert (caught.value.token_id, caught.value.index) == (token_id, 1)


def test_a_folder_gives_the_tokenizer_and_its_digest_names_it(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 263
    assert tokenizer.turn_end_id == END
    assert tokenizer.digest() == TOKENIZER.digest()
    assert len(tokenizer.digest()) == 32
    write_tokenizer(tmp_path, (*CONTROL[:-1], "<|other|>"))
    assert load_tokenizer(tmp_path).digest() != TOKENIZER.digest()


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (None, "tokenizer_config.json"),
        ("nonsense", "tokenizer_config.json"),
        ("[]", "tokenizer_config.json"),
        ("{}", "tokenizer_class"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "tokenizer_class"),
        ({"tokenizer_class": "TikTokenTokenizer"}, "tiktoken.model"),
        ({"tokenizer_class": "ByteTokenizer"}, "added_tokens_decoder"),
        ({"tokenizer_class": "ByteTokenizer", "added_tokens_decoder": {"x": {}}}, "added_tokens_decoder"),
    ],
)
def test_a_folder_without_a_known_tokenizer_is_refused(tmp_path: Path, content: object, key: str) -> None:
    if content is not None:
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "tokenizer_config.json").write_text(text)
    with pytest.raises(ModelConfigError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.key == key


@pytest.mark.parametrize(
    "control", [{255: "<|end|>"}, {256: "<|end|>", 257: "<|end|>"}, {256: "<|end|>"}, {256: "<|assistant|>"}]
)
def test_control_tokens_must_be_apart_from_bytes_and_complete(control: dict[int, str]) -> None:
    with pytest.raises(ModelConfigError):
        ByteTokenizer(control)
