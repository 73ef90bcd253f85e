"""The engine port: the only thing that the session layer knows about a model that computes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from forkpoint.parts import PartSpec
from forkpoint.server.engine.batch import Sampled, Work


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What identifies the served model and its arithmetic."""

    model_digest: bytes
    tokenizer_digest: bytes
    numerics_id: str
    vocab_size: int
    context_limit: int
    layout_tag: str
    """Digest of part names, dtypes and order: bytes of another layout are refused."""
    end_ids: tuple[int, ...] = ()
    """Ids that end every generation."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Pool sizes: a sequence holds one slot and ceil(consumed / 64) pages (full pages may be shared)."""

    slots_total: int
    slots_free: int
    pages_total: int
    pages_free: int
    slot_bytes: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class Capture:
    """The state at grid position ⌊consumed/16⌋·16, in memory of its own: later steps don't touch it."""

    grid_position: int
    parts: tuple[tuple[PartSpec, bytes], ...]
    """In layer order, without those that were left out."""
    specs: tuple[PartSpec, ...]
    """All of them."""
    settled: frozenset[str]
    """Names of parts, left out or not, that stay as they are while the sequence lives: full pages."""


class Engine(Protocol):
    """Sequences with their KDA slots and MLA pages.

    Synchronous and single-threaded: all methods are called from the engine thread. A sequence is an int handle, never
    reused within a process. Methods that raise leave every sequence as it was. Unknown handles raise KeyError: a bug
    of the caller.
    """

    @property
    def facts(self) -> ModelFacts:
        """Identity of the model; may be read from any thread."""
        ...

    def create(self) -> int:
        """A new, empty sequence. Raises NodeCapacityError without a free slot."""
        ...

    def fork(self, sequence: int) -> int:
        """A second sequence with the same state: slot and partial page are copied, full pages shared.
        Raises NodeCapacityError."""
        ...

    def free(self, sequence: int) -> None:
        """Give back slot and pages."""
        ...

    def consumed(self, sequence: int) -> int:
        """Tokens consumed so far."""
        ...

    def can_sample(self, sequence: int) -> bool:
        """Whether the final-norm row of the last consumed position is there. After a restore it is not until at
        least one token was consumed."""
        ...

    def pages_needed(self, sequence: int, token_count: int) -> int:
        """Free pages that consuming `token_count` more tokens would take."""
        ...

    def step(self, works: Sequence[Work]) -> list[Sampled | None]:
        """Run one batch; one entry per work, None where it asked for no sample. A sequence appears at most once.
        Raises NodeCapacityError (too few free pages) and NonFiniteLogitsError (it names the sequence without which the
        step can be tried again); nothing is consumed then."""
        ...

    def capture(self, sequence: int, known: Collection[str] = ()) -> Capture:
        """Copy the state at the sequence's last grid point, without the settled parts whose names are `known`.
        Raises NonFiniteStateError: no such state is stored."""
        ...

    def parts(self, grid_position: int) -> tuple[PartSpec, ...]:
        """The parts of a checkpoint at a grid position, in layer order."""
        ...

    def settled_parts(self, grid_position: int) -> Collection[str]:
        """Names of those that are the same at every later grid position of a sequence: full pages."""
        ...

    def begin_restore(self, grid_position: int) -> int:
        """A new sequence with slot and pages for `grid_position` tokens, its content not yet there.
        Raises NodeCapacityError."""
        ...

    def load_part(self, sequence: int, spec: PartSpec, data: bytes | bytearray | memoryview) -> None:
        """Fill one part; `data` is not kept. Raises StateIncompatibleError when `spec` is none of parts(grid_position)
        or sizes differ."""
        ...

    def end_restore(self, sequence: int) -> None:
        """The sequence is ready, consumed = grid_position. Raises StateIncompatibleError, naming them, when parts are
        missing; the sequence can then only be freed."""
        ...

    def capacity(self) -> Capacity:
        """Pool sizes now."""
        ...

    def check(self) -> list[str]:
        """Every inconsistency of the pools (free + used = total, reference counts, poison); empty when sound."""
        ...
