"""The only place that reads the machine's clocks; tests pass a clock of their own."""

import time
from typing import Protocol


class Clock(Protocol):
    """Time as the service sees it. `monotonic` decides (timeouts, leases); `wall` is only shown and stored."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall_us(self) -> int:
        """Microseconds since 1970-01-01 UTC, for display and retention only."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall_us(self) -> int:
        return time.time_ns() // 1000
