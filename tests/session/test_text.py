"""Text on its way to a reader: whole characters, stop strings, and nothing that depends on chunks."""

import random

import pytest

from forkpoint.server.session.text import TextTrail, whole_characters

PIECES = [
    b"a",
    b"b",
    b"ab",
    b"ba",
    b"\xc3",
    b"\xa9",
    b"\xf0\x9f",
    b"\x98",
    b"\x80",
    b"",
    b"\xff",
    "é".encode(),
    b"abab",
]


def trail(*stops: bytes, ids: tuple[int, ...] = (), start: int = 0) -> TextTrail:
    return TextTrail(start, lambda token: PIECES[token], stops, ids)


@pytest.mark.parametrize(
    ("data", "whole"),
    [
        (b"", 0),
        (b"abc", 3),
        (b"ab\xc3", 2),
        (b"ab\xc3\xa9", 4),
        (b"\xf0\x9f\x98", 0),
        (b"\xf0\x9f\x98\x80", 4),
        (b"\xff", 1),
        (b"a\xe0\x80", 3),
    ],
)
def test_only_a_character_cut_at_the_end_waits(data: bytes, whole: int) -> None:
    assert whole_characters(data) == whole


def test_a_character_in_pieces_comes_out_whole() -> None:
    text = trail()
    assert [text.feed(token) for token in (0, 6, 7, 8, 1)] == [b"a", b"", b"", "😀".encode(), b"b"]


def test_invalid_bytes_pass_as_they_are() -> None:
    text = trail()
    out = b"".join(text.feed(token) for token in (10, 4, 0)) + text.flush()
    assert out == b"\xff\xc3a"


def test_what_could_begin_a_stop_is_held_back_until_it_does_not() -> None:
    text = trail(b"abc")
    assert [text.feed(token) for token in (1, 0, 1, 0)] == [b"b", b"", b"", b"ab"]
    assert text.flush() == b"a"


def test_a_stop_across_tokens_ends_the_text_before_it() -> None:
    text = trail(b"bab", start=100)
    assert [text.feed(token) for token in (0, 2, 2, 0)] == [b"a", b"a", b"", b""]
    assert text.stop_position == 101, "the stop's first byte is in the second token"
    assert text.flush() == b""


def test_a_stop_inside_one_token_leaves_what_stands_before_it() -> None:
    text = trail(b"ba")
    assert text.feed(12) == b"a"
    assert text.stop_position == 0


def test_the_stop_that_is_complete_first_wins() -> None:
    text = trail(b"bab", b"ba")
    assert text.feed(12) == b"a"
    assert text.stop_position == 0


def test_a_stop_id_ends_the_text_and_lets_out_what_was_held() -> None:
    text = trail(b"abc", ids=(3,), start=5)
    assert [text.feed(token) for token in (0, 1, 3, 0)] == [b"", b"", b"ab", b""]
    assert text.stop_position == 7


def test_random_tokens_give_the_text_before_the_first_complete_stop(rng: random.Random) -> None:
    for _ in range(400):
        stops = tuple({rng.choice([b"abab", b"bb", b"aa", b"\xa9", "é".encode(), b"ba\xff"]) for _ in range(2)})
        tokens = [rng.randrange(len(PIECES)) for _ in range(rng.randrange(30))]
        text = trail(*stops)
        out = [text.feed(token) for token in tokens]
        data, stop_at, cut = b"", -1, None
        for position, token in enumerate(tokens):
            data += PIECES[token]
            ends = [(data.find(stop) + len(stop), data.find(stop)) for stop in stops if stop in data]
            if ends:
                cut = min(ends)[1]
                lengths = [len(b"".join(PIECES[t] for t in tokens[: n + 1])) for n in range(len(tokens))]
                stop_at = next(n for n, length in enumerate(lengths) if length > cut)
                assert position >= stop_at
                break
        assert text.stop_position == stop_at
        assert b"".join(out) + text.flush() == (data if cut is None else data[:cut])


def test_a_copy_goes_its_own_way() -> None:
    text = trail(b"ab")
    text.feed(0)
    twin = text.copy()
    assert twin.feed(1) == b"" and twin.stop_position == 0
    assert text.stop_position == -1 and text.feed(0) == b"a"
