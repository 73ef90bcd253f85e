"""What the process that forks servers is asked for, and what it answers: one JSON object a line."""

import json
from dataclasses import asdict, dataclass
from typing import Final, Self

LEAKED: Final = 3
"""Exit status of a server whose pools did not add up in the end."""
CRASHED: Final = 70
"""Of one that an exception ended."""
NO_STORE: Final = 75
"""Of one that could not start, or go on, for the store's sake: whoever starts it tries again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One server to start."""

    flags: dict[str, str | int]
    """Settings of ServerConfig, by name."""
    log: str
    """File that its output is added to."""
    knobs: str = ""
    """File of its Knobs; "": none."""
    engine: str = "hash"
    """`hash`: the engine of the tests, cheap and exact; `tiny`: the tiny model."""
    step_pause_ms: float = 0.0
    """What a step of the hash engine takes at least."""
    netns: str = ""
    """Network namespace that it lives in; "": the driver's."""
    gate: str = ""
    """File of the steps at which it may have to wait (tests/chaos/steps.py); "": it never has to."""

    def line(self) -> bytes:
        """As it is sent."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> Self:
        """The inverse of `line`."""
        return cls(**json.loads(line))
