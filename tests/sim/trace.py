"""What happened in a run, as a digest and as its last lines."""

from collections import deque
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

LINES_KEPT: Final = 400
FACT_CHARACTERS: Final = 200


class Trace:
    """Every fact goes into the digest: equal digests, equal runs."""

    def __init__(self, now: Callable[[], float], show: Callable[[str], None] | None = None) -> None:
        self._now = now
        self._show = show
        self._hash = blake2b(digest_size=16)
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self.facts = 0

    def note(self, *facts: object) -> None:
        """One fact: values whose repr says all of them."""
        line = f"{self._now():.6f} " + " ".join(map(_brief, facts))
        self._hash.update(line.encode())
        self._lines.append(line)
        self.facts += 1
        if self._show is not None:
            self._show(line)

    def digest(self) -> str:
        """Digest of all facts so far."""
        return self._hash.hexdigest()

    def tail(self) -> list[str]:
        """The last facts."""
        return list(self._lines)


def _brief(fact: object) -> str:
    if isinstance(fact, str):
        return fact
    if isinstance(fact, bytes):
        return blake2b(fact, digest_size=4).hexdigest()
    if isinstance(fact, tuple):
        return "(" + ", ".join(map(_brief, fact)) + ")"
    if isinstance(fact, Exception):
        return f"{type(fact).__name__}({fact})"
    if isinstance(fact, list):
        return f"{len(fact)} of them"
    return repr(fact)[:FACT_CHARACTERS]
