"""What a node is told about itself: identity, defaults and the times it goes by."""

from dataclasses import dataclass, field
from pathlib import Path

from forkpoint.limits import (
    CHECKPOINT_EVERY_TOKENS_DEFAULT,
    GC_GRACE_SECONDS_DEFAULT,
    LEASE_RENEW_SECONDS,
    LEASE_SKEW_SECONDS,
    LEASE_TTL_SECONDS,
    PREFILL_CHUNK_TOKENS_DEFAULT,
    SHUTDOWN_SECONDS,
    STALL_SECONDS_DEFAULT,
)
from forkpoint.statestore.retention import RetentionPolicy


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """`node` and `address` are shown to others. Times in seconds, sizes in tokens."""

    node: str
    address: str = ""
    namespace: str = "default"
    lock_folder: Path | None = None
    """Where the incarnation's lock file lies; None: no lock, others judge by the counter alone."""
    checkpoint_every_tokens: int = CHECKPOINT_EVERY_TOKENS_DEFAULT
    """For sessions that say nothing; 0: no automatic checkpoints."""
    checkpoint_on_turn_end: bool = False
    prefill_chunk_tokens: int = PREFILL_CHUNK_TOKENS_DEFAULT
    replay_limit_tokens: int = 4096
    """Rather replay up to this many tokens than restore a state that other numerics computed: about two seconds of
    prefill of the tiny model on two cores."""
    slice_tokens: int = 512
    """A generation that had a slot for this many tokens gives it to one that waits: a restore costs about as much as
    decoding ten tokens."""
    end_ids: tuple[int, ...] = ()
    """Stop ids of every generation, beside the call's."""
    lease_renew_seconds: float = LEASE_RENEW_SECONDS
    lease_ttl_seconds: float = LEASE_TTL_SECONDS
    lease_skew_seconds: float = LEASE_SKEW_SECONDS
    watch_seconds: float = 0.25
    """How often the node looks who else is there, and who died."""
    stall_seconds: float = STALL_SECONDS_DEFAULT
    """A step, a call of the engine or a turn of the event loop that takes longer costs the node its lease; 0: none
    does."""
    recovery_poll_seconds: float = 1.0
    """How often the node tries again to take sessions that a dead one left."""
    recovery_rank_seconds: float = 1.0
    """How long it leaves such a session to each of the nodes that are to take it first."""
    recovery_look_seconds: float = 10.0
    """How often it looks for sessions that nobody has, though no node came, went or died."""
    sweep_seconds: float = 30.0
    """How often expired sessions are looked for."""
    purge_seconds: float = 7 * 24 * 3600.0
    """A deleted session can be undeleted for so long."""
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    """Which checkpoints stay."""
    gc_interval_seconds: float = 0.0
    """How often the node collects garbage by itself; 0: only when it is asked to."""
    gc_grace_seconds: float = GC_GRACE_SECONDS_DEFAULT
    gc_budget_bytes: int = 0
    """What each tier may hold; 0: any amount."""
    retry_first_seconds: float = 0.1
    retry_most_seconds: float = 5.0
    """Back-off after a failed commit or restore: doubles from the first to the most."""
    shutdown_seconds: float = SHUTDOWN_SECONDS
