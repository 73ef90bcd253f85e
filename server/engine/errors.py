"""Errors that only an engine raises. A session that meets one is not lost: restore and replay bring it back.

ForkpointError
└── NonFiniteError
    ├── NonFiniteLogitsError        a step's numbers left the finite range
    └── NonFiniteStateError         ... and a capture found it
"""

from forkpoint.errors import ForkpointError


class NonFiniteError(ForkpointError):
    """A NaN or an infinity in a sequence: its state is not to be trusted. Free it, then restore and replay."""

    reason = "INTERNAL"

    def __init__(self, sequence: int, where: str) -> None:
        super().__init__(f"sequence {sequence}: {where} is not finite")
        self.sequence, self.where = sequence, where


class NonFiniteLogitsError(NonFiniteError):
    """A step gave a NaN or an infinity where `sequence` would be sampled next, after `position` tokens.

    Nothing was sampled, and every sequence of the step is as it was: without this one the step can be tried again.
    """

    def __init__(self, sequence: int, position: int, what: str = "logits") -> None:
        super().__init__(sequence, f"{what} at position {position}")
        self.position = position


class NonFiniteStateError(NonFiniteError):
    """A capture found a NaN or an infinity in `part`: it must not become a checkpoint."""

    def __init__(self, sequence: int, part: str) -> None:
        super().__init__(sequence, f"part {part}")
        self.part = part
