"""What a collection did, or (dry run) would do, as values."""

from dataclasses import dataclass, field

from forkpoint.statestore.records import ManifestKey
from forkpoint.statestore.retention import Drop, Verdict


@dataclass(slots=True)
class CollectionReport:
    """Counts up to now; complete once `done`. Bytes are those of frames, as the tier stores them."""

    tier: str
    dry_run: bool
    done: bool = False
    stopped: str = ""
    """Why no blob was deleted, when something stood in the way."""
    pins_dropped: int = 0
    """Of restorers that are not there any more."""
    checkpoints_kept: int = 0
    checkpoints_dropped: dict[Drop, int] = field(default_factory=dict)
    workflows_left: int = 0
    """Whose trees kept growing while they were judged: next time."""
    manifests_kept: int = 0
    manifests_removed: int = 0
    blobs_marked: int = 0
    """Named by a manifest."""
    blobs_waiting: int = 0
    """Named by none, not for long enough yet."""
    blobs_spared: int = 0
    """Named by none when looked for, and by one once condemned."""
    blobs_deleted: int = 0
    bytes_deleted: int = 0
    blobs_evicted: int = 0
    """Named, and dropped from a cache that held too much."""
    bytes_evicted: int = 0
    bytes_over_budget: int = 0
    """What the tier holds beyond its budget and nothing may be dropped for."""
    dropped: list[Verdict] = field(default_factory=list)
    """Only of a dry run: which checkpoints would go."""
    removed: list[ManifestKey] = field(default_factory=list)
    """Only of a dry run: which manifests."""
    doomed: list[str] = field(default_factory=list)
    """Only of a dry run: which blobs."""
