"""Bytes of a generation's tokens on their way to a reader, and where a stop lies in them."""

import codecs
from collections import deque
from collections.abc import Callable
from typing import Self


def whole_characters(data: bytes) -> int:
    """Bytes of `data` before a UTF-8 character that is cut at its end. Invalid bytes count as whole."""
    return codecs.utf_8_decode(data, "replace", False)[1]


class TextTrail:
    """Takes tokens one by one, gives out text.

    Text holds whole characters and holds back the longest suffix that could begin a stop string. What is out after a
    token depends on the tokens alone, not on how they were cut into chunks. Matching begins with the trail's first
    token. After a stop nothing more comes out; the stop string's own bytes and a stop id's never do.
    """

    def __init__(
        self,
        start: int,
        token_bytes: Callable[[int], bytes],
        stop_text: tuple[bytes, ...] = (),
        stop_ids: tuple[int, ...] = (),
    ) -> None:
        self.position = start
        self.stop_position = -1
        """Position of the token that holds the stop's first byte, or of the stop id; -1: none yet."""
        self._token_bytes = token_bytes
        self._stop_text = tuple(stop for stop in stop_text if stop)
        self._stop_ids = frozenset(stop_ids)
        self._held = b""
        self._marks: deque[tuple[int, int]] = deque()
        """(bytes of _held up to the end of the token, its position)"""

    def copy(self) -> Self:
        """An independent trail at the same place."""
        twin = type(self)(self.position, self._token_bytes)
        twin.stop_position = self.stop_position
        twin._stop_text, twin._stop_ids = self._stop_text, self._stop_ids
        twin._held, twin._marks = self._held, deque(self._marks)
        return twin

    def feed(self, token_id: int) -> bytes:
        """The text that this token lets out."""
        position, self.position = self.position, self.position + 1
        if self.stop_position >= 0:
            return b""
        if token_id in self._stop_ids:
            self.stop_position = position
            return self._release(len(self._held))
        data = self._token_bytes(token_id)
        if not data:
            return b""
        self._held += data
        self._marks.append((len(self._held), position))
        found = self._find_stop()
        if found >= 0:
            self.stop_position = next(at for end, at in self._marks if found < end)
            text = self._release(found)
            self._held = b""
            return text
        return self._release(whole_characters(self._held[: len(self._held) - self._stop_prefix()]))

    def flush(self) -> bytes:
        """What was held back, when no more tokens come."""
        return self._release(len(self._held))

    def _find_stop(self) -> int:
        """Start of the stop string that is complete first (the longest of those that end together); -1: none."""
        found = [(at + len(stop), at) for stop in self._stop_text if (at := self._held.find(stop)) >= 0]
        return min(found)[1] if found else -1

    def _stop_prefix(self) -> int:
        """Length of the longest suffix that a stop string begins with."""
        longest = min(len(self._held), max((len(stop) - 1 for stop in self._stop_text), default=0))
        for length in range(longest, 0, -1):
            suffix = self._held[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stop_text):
                return length
        return 0

    def _release(self, size: int) -> bytes:
        text, self._held = self._held[:size], self._held[size:]
        self._marks = deque((end - size, at) for end, at in self._marks if end > size)
        return text
