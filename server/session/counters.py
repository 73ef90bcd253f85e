"""What happened on this node, as plain numbers; server/rpc renders them."""

from dataclasses import dataclass, field
from typing import Final

RATE_WEIGHT: Final = 0.2
"""Weight of the newest sample in a moving average."""


@dataclass(slots=True)
class Counters:
    """Totals since the node started. Seconds and tokens a second where the name says so."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    generations_started: int = 0
    generations_finished: int = 0
    checkpoints_written: int = 0
    checkpoints_failed: int = 0
    checkpoints_skipped: int = 0
    """Captures that a newer one overtook before they were written."""
    checkpoint_bytes_stored: int = 0
    checkpoint_bytes_shared: int = 0
    restores: int = 0
    restored_tokens: int = 0
    restored_bytes: int = 0
    replayed_tokens: int = 0
    fallback_restores: int = 0
    """Checkpoints passed over because a part was missing or damaged."""
    inexact_restores: int = 0
    forks: int = 0
    fork_images: int = 0
    fork_images_used: int = 0
    fork_images_dropped: int = 0
    parked: int = 0
    recovered_generations: int = 0
    stale_epochs: int = 0
    commit_conflicts: int = 0
    commit_failures: int = 0
    session_failures: int = 0
    sessions_quarantined: int = 0
    moves: int = 0
    """Sessions that went to another node while this one ran them."""
    move_pause_seconds: float = 0.0
    """Of all moves together: how long their sessions stood still."""
    arrivals: int = 0
    """Sessions that came so from another node."""
    collections: int = 0
    """Garbage collections of a tier."""
    checkpoints_dropped: int = 0
    blobs_deleted: int = 0
    bytes_deleted: int = 0
    blobs_evicted: int = 0
    """From caches that held too much."""
    prefill_tokens_per_second: float = field(default=0.0)
    restore_bytes_per_second: float = field(default=0.0)

    def note_prefill(self, tokens: int, seconds: float) -> None:
        """A prefill of `tokens` took `seconds`."""
        self.prefill_tokens_per_second = _average(self.prefill_tokens_per_second, tokens / max(seconds, 1e-6))

    def note_move(self, pause_seconds: float) -> None:
        """A session went to another node, and stood still for so long."""
        self.moves += 1
        self.move_pause_seconds += pause_seconds

    def note_load(self, size: int, seconds: float) -> None:
        """Loading `size` bytes of a checkpoint took `seconds`."""
        self.restore_bytes_per_second = _average(self.restore_bytes_per_second, size / max(seconds, 1e-6))


def _average(old: float, new: float) -> float:
    return new if old == 0 else old + RATE_WEIGHT * (new - old)
