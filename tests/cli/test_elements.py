"""What `forkpoint chat` shows of an answer in elements."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forkpoint.cli.elements import Elements

STEADY = settings(deadline=None, derandomize=True, database=None)
ANSWER = (
    "2 < 3, so…<|close|>think<|sep|><|open|>response<|sep|>It is 3 🙂.<|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|><|open|>argument key="at" type="string"<|sep|>Rome'
    "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
)
CALL = '[call tool="now" index="1"][argument key="at" type="string"]Rome[/argument][/call]'
SHOWN = {
    (True, True): "2 < 3, so…\n\nIt is 3 🙂." + CALL,
    (False, True): "2 < 3, so…\n\nIt is 3 🙂." + CALL,
    (True, False): "It is 3 🙂." + CALL,
}


@pytest.mark.parametrize("options", SHOWN)
def test_thinking_is_shown_or_hidden_and_calls_stand_in_brackets(options: tuple[bool, bool]) -> None:
    elements = Elements(*options)
    assert (elements.feed(ANSWER.encode()) + elements.flush()).decode() == SHOWN[options]


@STEADY
@given(st.sampled_from(list(SHOWN)), st.lists(st.integers(0, len(ANSWER.encode())), max_size=12))
def test_how_the_text_is_cut_changes_nothing(options: tuple[bool, bool], cuts: list[int]) -> None:
    data, places = ANSWER.encode(), [0, *sorted(cuts), len(ANSWER.encode())]
    elements = Elements(*options)
    shown = b"".join(elements.feed(data[a:b]) for a, b in pairwise(places)) + elements.flush()
    assert shown.decode() == SHOWN[options]


@STEADY
@given(st.text(alphabet="a<|opencls> \n", max_size=60))
def test_text_without_elements_passes_as_it_is_and_in_time(text: str) -> None:
    elements = Elements(False, True)
    shown = [elements.feed(character.encode()) for character in text]
    assert b"".join(shown) + elements.flush() == text.encode()
    elements = Elements(False, True)
    assert elements.feed(b"<|open|>" + b"x" * 2000) == b"<|open|>" + b"x" * 2000, "no tag is so long"
    assert elements.feed(b"a<|") == b"a"


def test_thinking_that_never_ends_stays_hidden() -> None:
    elements = Elements(True, False)
    assert elements.feed(b"hm <|close|>thi") + elements.flush() == b""
