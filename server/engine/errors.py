"""Errors that only an engine raises: a sequence is lost, its session is not (restore and replay bring it back).

ForkpointError
└── SequenceLostError             the sequence can only be freed
    ├── NonFiniteLogitsError        its numbers left the finite range in a step
    └── NonFiniteStateError         ... and a capture found it
"""

from forkpoint.errors import ForkpointError


class SequenceLostError(ForkpointError):
    """The sequence's state is not to be trusted: an earlier step on it failed. It can only be freed."""

    reason = "INTERNAL"

    def __init__(self, sequence: int, why: str = "an earlier step on it failed") -> None:
        super().__init__(f"sequence {sequence} is lost: {why}")
        self.sequence, self.why = sequence, why


class NonFiniteLogitsError(SequenceLostError):
    """A step gave a NaN or an infinity where `sequence` would be sampled. `position`: tokens it has consumed.

    Nothing was sampled. `sequence` is lost and can only be freed. Every other sequence of the step has consumed its
    tokens and is sound: sample it again by a work without tokens.
    """

    def __init__(self, sequence: int, position: int, what: str = "logits") -> None:
        super().__init__(sequence, f"{what} at position {position} are not finite")
        self.position = position


class NonFiniteStateError(SequenceLostError):
    """A capture found a NaN or an infinity in `part`: it must not become a checkpoint."""

    def __init__(self, sequence: int, part: str) -> None:
        super().__init__(sequence, f"part {part} is not finite")
        self.part = part
