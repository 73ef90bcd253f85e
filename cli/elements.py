"""What a model says in elements, as K3 does, made readable while it comes."""

import re
from typing import Final

_TAG: Final = re.compile(rb"<\|(open|close)\|>([^<]*)<\|sep\|>")
_STARTS: Final = (b"<|open|>", b"<|close|>")
_TAG_BYTES_MAX: Final = 1024
"""A tag is a name and a few attributes; what is longer is text that looks like one."""
_SILENT: Final = frozenset({b"message", b"response", b"tools"})


class Elements:
    """Takes text in pieces and gives out what to show. Tags of thinking and of the answer are not shown, nor is
    thinking when it is hidden; a tag of anything else, such as a tool's call, stands in brackets. Text without elements
    passes as it is."""

    def __init__(self, begins_thinking: bool, show_thinking: bool) -> None:
        """`begins_thinking`: the text begins inside the element of thinking, whose tag is in the prompt."""
        self._thinking = begins_thinking
        self._show_thinking = show_thinking
        self._held = b""

    def feed(self, text: bytes) -> bytes:
        """What the next piece lets out."""
        self._held += text
        shown = b""
        while tag := _TAG.search(self._held):
            shown += self._text(self._held[: tag.start()]) + self._tag(tag[1] == b"open", tag[2])
            self._held = self._held[tag.end() :]
        kept = self._open_tag()
        shown += self._text(self._held[:kept])
        self._held = self._held[kept:]
        return shown

    def flush(self) -> bytes:
        """What was held back, when no more text comes."""
        rest, self._held = self._held, b""
        return self._text(rest)

    def _open_tag(self) -> int:
        """Where a tag begins that more text may complete; the text's end when there is none."""
        begun = max(self._held.rfind(start) for start in _STARTS)
        if begun >= 0 and len(self._held) - begun <= _TAG_BYTES_MAX:
            return begun
        longest = max(map(len, _STARTS)) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(start.startswith(self._held[-length:]) for start in _STARTS):
                return len(self._held) - length
        return len(self._held)

    def _text(self, text: bytes) -> bytes:
        return text if self._show_thinking or not self._thinking else b""

    def _tag(self, opens: bool, content: bytes) -> bytes:
        name = content.partition(b" ")[0]
        if name == b"think":
            self._thinking = opens
            return b"\n\n" if self._show_thinking and not opens else b""
        if name in _SILENT or (self._thinking and not self._show_thinking):
            return b""
        return b"[%s%s]" % (b"" if opens else b"/", content)
