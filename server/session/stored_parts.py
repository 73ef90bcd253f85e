"""StoredParts: what the store has of a state that is on the engine."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class StoredParts:
    """Digests of settled parts of one sequence that a checkpoint was saved with, or loaded from.

    They are as long true as the sequence lives: no token changes a settled part. So a capture leaves them out, and a
    save names them by their digest.
    """

    sequence: int | None = None
    digests: dict[str, str] = field(default_factory=dict)

    def of(self, sequence: int) -> "StoredParts":
        """Itself, or what is known of another sequence: nothing yet."""
        return self if self.sequence == sequence else StoredParts(sequence)

    def note(self, found: Iterable[tuple[str, str]], settled: Collection[str]) -> None:
        """Remember those of `found` (name, digest) that are settled."""
        self.digests.update((name, digest) for name, digest in found if name in settled)

    def copy(self, sequence: int) -> "StoredParts":
        """The same of a sequence with the same past."""
        return StoredParts(sequence, dict(self.digests))
