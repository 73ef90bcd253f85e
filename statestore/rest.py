"""Rest: a tier that failed is left alone for a while, longer each time."""

from typing import Final

from forkpoint.clock import Clock

FIRST_SECONDS: Final = 1.0
MOST_SECONDS: Final = 60.0
"""A tier that came back is used again after at most this."""


class Rest:
    """Failures of one tier, and whether it rests now."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._in_a_row = 0
        self._until = clock.monotonic()
        self.failures = 0
        """All of them so far."""

    @property
    def is_over(self) -> bool:
        """Whether the tier may be asked."""
        return self._in_a_row == 0 or self._clock.monotonic() >= self._until

    def failed(self) -> None:
        """Rest from now on, twice as long as the last time."""
        self.failures += 1
        self._in_a_row += 1
        self._until = self._clock.monotonic() + min(MOST_SECONDS, FIRST_SECONDS * 2.0 ** (self._in_a_row - 1))

    def worked(self) -> None:
        """It answers: the next rest is a short one again."""
        self._in_a_row = 0
