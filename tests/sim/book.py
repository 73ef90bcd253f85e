"""What a client knows of a session that it alone writes, from answers only."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.statestore.chain import HashChain
from tests.support.session_site import MARKER


class ResyncError(Exception):
    """The store lost what the client knew: it has read the log again, and its operation is off."""


@dataclass
class Book:
    """`samples`: for each token the parameters that it was sampled with, None when it was appended. `eras`: logs that
    a rewind cut or a loss took, then the one of now."""

    name: SessionName
    seed: int
    tokens: list[int] = field(default_factory=list)
    samples: list[Sample | None] = field(default_factory=list)
    eras: list[list[int]] = field(default_factory=lambda: [[]])
    paused: bool = False
    deleted: bool = False
    checkpoints: int = 0
    resyncs: int = 0
    synced_at_loss: int = 0
    """Losses of the store that the client has learnt of."""

    @property
    def head(self) -> int:
        """Length of the log as told."""
        return len(self.tokens)

    def head_hash(self) -> bytes:
        """The hash that an equal log has."""
        chain = HashChain.root(MARKER)
        chain.extend(self.tokens)
        return chain.head_hash()

    def grow(self, tokens: Sequence[int], sample: Sample | None) -> None:
        """These were acknowledged at the head."""
        self.tokens += tokens
        self.samples += [sample] * len(tokens)
        self.eras[-1] = list(self.tokens)

    def cut(self, position: int) -> None:
        """A rewind was acknowledged."""
        del self.tokens[position:], self.samples[position:]
        self.eras.append(list(self.tokens))

    def child(self, name: SessionName, seed: int, position: int) -> "Book":
        """The book of a fork."""
        tokens = self.tokens[:position]
        return Book(name, seed, tokens, self.samples[:position], [list(tokens)], synced_at_loss=self.synced_at_loss)
