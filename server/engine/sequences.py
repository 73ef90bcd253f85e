"""LiveSequence: what the engine keeps for one sequence beside the tensors of its slot and pages."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from forkpoint.limits import PAGE_TOKENS, TILE_TOKENS
from forkpoint.parts import PartSpec


def pages_for(position: int) -> int:
    """Pages that hold the latents of `position` tokens."""
    return -(-position // PAGE_TOKENS)


@dataclass(slots=True)
class LiveSequence:
    """A sequence and the memory that it holds.

    `pages` has exactly ceil(consumed / 64) ids. The last one is written by this sequence alone unless it is full; full
    ones may be shared. `rows_from`: positions below it have no final-norm row here, because a checkpoint holds none.
    While it is being restored, `expected` are its parts by name, `missing` the names of those not loaded yet, and
    `staged` is host memory of the KDA parts; None once the sequence is ready.
    """

    handle: int
    slot: int
    pages: list[int] = field(default_factory=list)
    consumed: int = 0
    rows_from: int = 0
    expected: Mapping[str, PartSpec] | None = None
    missing: set[str] = field(default_factory=set)
    staged: Tensor | None = None

    @property
    def can_sample(self) -> bool:
        """Whether the final-norm row of the last consumed position is in the slot."""
        return self.expected is None and self.consumed > self.rows_from

    @property
    def grid_position(self) -> int:
        """The last tile boundary: the position of the state that a capture would copy."""
        return self.consumed // TILE_TOKENS * TILE_TOKENS

    def pages_needed(self, token_count: int) -> int:
        """Pages to take before `token_count` more tokens can be consumed."""
        return pages_for(self.consumed + token_count) - len(self.pages)

    def require_ready(self) -> None:
        """Raise ValueError during a restore."""
        if self.expected is not None:
            raise ValueError(f"sequence {self.handle} is being restored")
