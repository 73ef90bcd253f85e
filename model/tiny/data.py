"""Text for the tiny model: Python standard-library source with planted memos, and chat turns that ask for them.

Pure Python, no dependencies, deterministic for a seed and one interpreter version: the source comes from the standard
library of the running interpreter (PSF licence). Modules are split by the CRC of their relative path, so documents and
trials (`"eval"`) never show text that training (`"train"`) saw.

A token is a byte; control tokens are 256 and up. Inside training rows they are written as bytes 0xF8-0xFE, which UTF-8
never uses, so that a row is plain `bytes` (`PLACEHOLDERS` maps back).
"""

import os
import re
import sysconfig
import zlib
from functools import lru_cache
from pathlib import Path
from random import Random

PAD, BOS, SYSTEM, USER, ASSISTANT, END, TOOL = range(256, 263)
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
PLACEHOLDERS = {0xF8 + i: 256 + i for i in range(7)}

_PAD, _BOS, _SYSTEM, _USER, _ASSISTANT, _END, _TOOL = (bytes([0xF8 + i]) for i in range(7))
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
_EVAL_SHARE = 8  # one module in eight is kept for documents and trials
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_VALUE_CHARS = _LETTERS + "0123456789"
_SYSTEM_TEXTS = (
    b"You remember memos.",
    b"You are a careful assistant. Answer with the value only.",
    b"Keep every memo until it is asked for.",
    b"You read Python source and recall what was noted in it.",
)

# Loss weights, in tenths: what the model must learn to say counts, random keys and values at first sight do not.
_NONE, _LOW, _TEXT, _REPLY, _ANSWER = 0, 1, 10, 30, 100


@lru_cache(maxsize=2)
def corpus(split: str) -> bytes:
    """All source of one split ("train" or "eval"), modules in path order, separated by blank lines.

    "eval" holds ASCII modules only, so that a document may be cut at any byte.
    """
    root = Path(sysconfig.get_path("stdlib"))
    parts: list[bytes] = []
    for folder, names, files in os.walk(root):
        names[:] = sorted(n for n in names if n not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            path = Path(folder, name)
            if not name.endswith(".py") or name.startswith("_sysconfigdata"):
                continue
            held_out = zlib.crc32(path.relative_to(root).as_posix().encode()) % _EVAL_SHARE == 0
            if held_out != (split == "eval"):
                continue
            text = path.read_bytes().replace(b"\r\n", b"\n")
            if text.isascii() or (split == "train" and max(text) < 0xF8):
                parts.append(text.strip(b"\n") + b"\n")
    if not parts:
        raise FileNotFoundError(f"no Python source under {root}")
    return b"\n\n".join(parts)


@lru_cache(maxsize=2)
def _words(split: str) -> list[str]:
    return sorted({w.decode() for w in re.findall(rb"\b[a-z]{4,10}\b", corpus(split))})


def _spoken_key(rng: Random) -> str:
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 5)))


def _any_key(rng: Random, split: str) -> str:
    kind = rng.random()
    if kind < 0.45:
        return "".join(rng.choices(_LETTERS, k=rng.randint(4, 10)))
    return _spoken_key(rng) if kind < 0.85 else rng.choice(_words(split))


def _value(rng: Random) -> str:
    return "".join(rng.choices(_VALUE_CHARS, k=6))


def _source(rng: Random, split: str, length: int, whole_lines: bool = False) -> bytes:
    """`length` bytes of source from a random line start; with `whole_lines`, the next start whose text ends a line."""
    text = corpus(split)
    if length > len(text) // 2:
        raise ValueError(f"length {length} exceeds half of the {split} source ({len(text)} bytes)")
    start = text.index(b"\n", rng.randrange(len(text) - length - 4096)) + 1
    while whole_lines and text[start + length - 1 : start + length] != b"\n":
        start = text.index(b"\n", start) + 1
        if start + length > len(text):
            start = 0
    return text[start : start + length]


def _plant(rng: Random, source: bytes, lines: list[bytes]) -> bytes:
    """`source` with `lines`, in this order, inserted at distinct random line starts."""
    starts = [0, *(m.end() for m in re.finditer(rb"\n", source[:-1]))]
    if len(starts) < len(lines):
        raise ValueError(f"{len(lines)} memos need as many lines, got {len(starts)}")
    cuts = sorted(rng.sample(starts, len(lines)))
    pieces = [source[a:b] for a, b in zip([0, *cuts], [*cuts, len(source)], strict=True)]
    return pieces[0] + b"".join(line + piece for line, piece in zip(lines, pieces[1:], strict=True))


def memo_line(key: str, value: str) -> bytes:
    """The comment line that plants one memo in a document."""
    return f"# memo {key} = {value}\n".encode()


def make_document(seed: int, length: int, memos: int) -> tuple[bytes, dict[str, str]]:
    """Python source of exactly `length` ASCII bytes with `memos` planted memo lines; returns (document, key -> value).

    Whole lines of source that no training run has seen. Raises ValueError when `length` has no room for the memos.
    """
    rng = Random(f"document {seed}")
    planted: dict[str, str] = {}
    while len(planted) < memos:
        planted[_spoken_key(rng)] = _value(rng)
    lines = [memo_line(k, v) for k, v in planted.items()]
    room = length - sum(map(len, lines))
    if room < 64 * max(1, memos):
        raise ValueError(f"{length} bytes have no room for {memos} memos")
    return _plant(rng, _source(rng, "eval", room, whole_lines=True), lines), planted


def turn(role: str, text: str) -> list[int]:
    """Token ids of one chat turn, `<|ROLE|>TEXT<|end|>`."""
    return [ROLES[role], *text.encode(), END]


def question(key: str) -> list[int]:
    """Token ids that ask for a memo and open the answer; the answer is the value's bytes and `<|end|>`."""
    return [*turn("user", f"recall {key}"), ASSISTANT]


def recall_trial(seed: int, distance: int) -> tuple[list[int], bytes]:
    """One recall trial: (prompt token ids, the value's bytes the model must answer).

    The memo's value begins exactly `distance` tokens before the answer. Some source stands before it, and three other
    memos between it and the question. Unseen source, keys and values.
    """
    rng = Random(f"trial {seed} {distance}")
    keys: dict[str, str] = {}
    while len(keys) < 4:
        keys[_any_key(rng, "eval")] = _value(rng)
    (key, value), *others = keys.items()
    asked = question(key)
    lines = [memo_line(k, v) for k, v in others]
    room = distance - len(value) - 1 - sum(map(len, lines)) - len(asked)
    if room < 256:
        raise ValueError(f"distance {distance} is too short for a trial")
    before = _source(rng, "eval", rng.randint(0, 200))
    before = before[: before.rfind(b"\n") + 1]
    after = _plant(rng, _source(rng, "eval", room), lines)
    return [*before, *memo_line(key, value), *after, *asked], value.encode()


class _Row:
    """One training row under construction: bytes, a loss weight for each, memos so far, and a place in the source."""

    def __init__(self, rng: Random, length: int) -> None:
        self.rng = rng
        self.text = corpus("train")
        self.cursor = rng.randrange(len(self.text) - 3 * length - 4096)
        self.tokens = bytearray()
        self.weights = bytearray()
        self.memos: dict[str, str] = {}
        self.unasked: set[str] = set()

    def add(self, text: bytes, weight: int) -> None:
        self.tokens += text
        self.weights += bytes([weight]) * len(text)

    def new_memo(self, again: float) -> tuple[str, str]:
        """A fresh memo, or (with chance `again`) a new value for a known key: the newest one counts."""
        known = self.memos and self.rng.random() < again
        key = self.rng.choice(list(self.memos)) if known else _any_key(self.rng, "train")
        self.memos[key] = _value(self.rng)
        self.unasked.add(key)
        return key, self.memos[key]

    def asked(self) -> str:
        """A known key, mostly one that was not asked for yet, so that answers are far from their memo."""
        fresh = self.unasked and self.rng.random() < 0.8
        key = self.rng.choice(sorted(self.unasked) if fresh else list(self.memos))
        self.unasked.discard(key)
        return key

    def source(self, end: int) -> None:
        self.add(self.text[self.cursor : end], _TEXT)
        self.cursor = end

    def block(self, length: int) -> None:
        """About `length` bytes of source with memo and recall lines at random line starts."""
        rng, start = self.rng, self.cursor
        count = rng.randint(1, max(1, min(14, length // rng.choice((120, 250, 500)))))
        for offset in sorted(rng.randrange(length) for _ in range(count)):
            line = self.text.index(b"\n", max(start + offset, self.cursor)) + 1
            if line > start + length:
                break
            self.source(line)
            if self.memos and rng.random() < 0.2:
                key = self.asked()
                self.add(f"# recall {key} = ".encode(), _NONE)
                self.add(self.memos[key].encode() + b"\n", _ANSWER)
            else:
                self.add(memo_line(*self.new_memo(0.02)), _NONE)
        end = start + length
        if rng.random() < 0.7:  # mostly whole lines
            end = self.text.index(b"\n", end) + 1
        self.source(max(end, self.cursor))

    def document(self, length: int, first: bool) -> None:
        """A block, raw or inside a system or user turn."""
        kind = self.rng.random()
        if kind < 0.6:
            self.block(length)
            return
        user = kind < 0.85 or not first
        self.add(_USER if user else _SYSTEM, _LOW)
        self.block(length)
        self.add(_END, _LOW)
        if user:
            self.add(_ASSISTANT, _LOW)
            self.add(b"ok" + _END, _REPLY)

    def turn(self, room: int) -> None:
        """One chat turn: recall a memo, set one, or continue the source."""
        kind = self.rng.random()
        if kind < 0.7 and self.memos:
            key = self.asked()
            self.add(_USER + b"recall " + key.encode() + _END + _ASSISTANT, _LOW)
            self.add(self.memos[key].encode() + _END, _ANSWER)
        elif kind < 0.85 or room < 250:
            key, value = self.new_memo(0.1)
            self.add(_USER + f"memo {key} = {value}".encode() + _END + _ASSISTANT, _LOW)
            self.add(b"ok" + _END, _REPLY)
        else:
            self.add(_USER + b"continue" + _END + _ASSISTANT, _LOW)
            end = self.text.find(b"\n\n", self.cursor + 100, self.cursor + 400) + 1
            self.source(end or self.text.rfind(b"\n", 0, self.cursor + 400) + 1)
            self.add(_END, _REPLY)


def _training_row(rng: Random, length: int) -> _Row:
    """A row of at least `length` tokens: documents and groups of turns in alternation, turns last."""
    row = _Row(rng, length)
    if rng.random() < 0.25:
        row.add(_SYSTEM + rng.choice(_SYSTEM_TEXTS) + _END, _LOW)
    groups = 1 if rng.random() < 0.6 else rng.randint(2, 3)
    talk = rng.uniform(0.2, 0.55) if length < 1024 else rng.uniform(0.04, 0.22)
    cuts = sorted(rng.uniform(0.15, 1.0) for _ in range(groups - 1))
    for index, (low, high) in enumerate(zip([0.0, *cuts], [*cuts, 1.0], strict=True)):
        share = (high - low) * (length - len(row.tokens) if index == 0 else length)
        row.document(max(48, int(share * (1 - talk))), first=index == 0)
        until = length if index == groups - 1 else len(row.tokens) + int(share * talk)
        while len(row.tokens) < until:
            row.turn(until - len(row.tokens))
    return row


def training_batch(seed: int, step: int, rows: int, length: int) -> tuple[bytes, bytes]:
    """`rows` training rows of `length` + 1 tokens: (placeholder bytes, loss weights in tenths), row after row."""
    rng = Random(f"batch {seed} {step}")
    tokens, weights = bytearray(), bytearray()
    for _ in range(rows):
        row = _training_row(rng, length + 1)
        tokens += row.tokens[: length + 1].ljust(length + 1, _PAD)
        weights += row.weights[: length + 1].ljust(length + 1, bytes([_NONE]))
    return bytes(tokens), bytes(weights)
