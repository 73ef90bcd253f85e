"""The rows a catalog keeps, as plain values. Times: microseconds since 1970 (UTC), for display and retention only."""

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from forkpoint.ids import SessionName

SCHEMA_VERSION: Final = 3
"""Of what catalogs keep, and how. A store of an older version is brought up to this one when it is opened."""


class Durability(Enum):
    """What an acknowledgement survives."""

    MEMORY = "MEMORY"
    """Nothing: the process holds it."""
    LOCAL_FSYNC = "LOCAL_FSYNC"
    """A crash of the process and of the operating system."""
    REPLICATED = "REPLICATED"
    """The loss of one store node."""


class Kind(Enum):
    """Where a token came from."""

    PROMPT = 1
    GENERATED = 2


class SessionState(Enum):
    """Durable states. GENERATING, RESTORING and the like are live facts of the owner, not rows."""

    ACTIVE = "ACTIVE"
    PAUSED = "PAUSED"
    QUARANTINED = "QUARANTINED"
    DELETED = "DELETED"


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "STOP"
    LENGTH = "LENGTH"
    CANCELLED = "CANCELLED"
    PAUSED = "PAUSED"
    BUDGET_REACHED = "BUDGET_REACHED"
    CONTEXT_FULL = "CONTEXT_FULL"


@dataclass(frozen=True, slots=True)
class StoreMarker:
    """What a store was made for. Opening it with any other value is StateIncompatibleError."""

    schema_version: int
    namespace: str
    model_digest: bytes
    tokenizer_digest: bytes


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """What a node tells about itself with each renewal of its lease: as old as that."""

    draining: bool = False
    """Nothing is to be placed on it."""
    stalled: bool = False
    """Its process lives, its work does not get on."""
    slots_total: int = 0
    slots_free: int = 0
    pages_total: int = 0
    pages_free: int = 0
    sessions: int = 0
    """Sessions that it owns."""
    waiting: int = 0
    """Of them, those that want a slot and have none."""
    following: int = 0
    """Sessions of other nodes that it follows."""


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One incarnation of a serving process. `counter` is its lease: it lives while the counter moves."""

    incarnation: str
    node: str
    address: str
    numerics_id: str
    counter: int = 0
    lock_path: str = ""
    """File whose flock the incarnation holds for its whole life; "" where there is none (another host)."""
    status: NodeStatus = field(default_factory=NodeStatus)


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Identity of a mutating call. `digest`: of its content, less resume position, deadline and disconnect policy."""

    caller: str
    workflow: str
    request_id: str
    digest: bytes


@dataclass(frozen=True, slots=True)
class WorkflowRow:
    """A group of sessions that are accounted together."""

    workflow: str
    labels: dict[str, str] = field(default_factory=dict)
    create_us: int = 0
    update_us: int = 0
    delete_us: int | None = None
    revision: int = 1
    """Counts changes; the etag."""
    standbys: int = 0
    """Of sessions that are created in it and say nothing."""


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When checkpoints are taken by themselves, and how many are kept. `every_tokens` 0 switches the cadence off."""

    every_tokens: int
    on_turn_end: bool = False
    keep_last: int = 0
    """How many of its newest checkpoints retention keeps; 0: as many as the server's default says."""


@dataclass(frozen=True, slots=True)
class NewSession:
    """What a create or fork writes."""

    name: SessionName
    seed: int
    """Signed 64-bit: the session's sampling seed."""
    policy: CheckpointPolicy
    labels: dict[str, str] = field(default_factory=dict)
    transient: bool = False
    expire_us: int | None = None
    standbys: int = 0


@dataclass(frozen=True, slots=True)
class SessionRow:
    """A session as the catalog knows it."""

    name: SessionName
    branch: str
    """Id of the branch whose log the name points at; rewind swaps it."""
    state: SessionState
    state_reason: str
    head: int
    head_hash: bytes
    epoch: int
    owner: str
    """Incarnation that owns it, "" when nobody does."""
    parent: SessionName | None
    fork_position: int
    seed: int
    policy: CheckpointPolicy
    labels: dict[str, str]
    transient: bool
    exact: bool
    numerics_ids: tuple[str, ...]
    expire_us: int | None
    create_us: int
    update_us: int
    delete_us: int | None
    purge_us: int | None
    revision: int
    """Counts changes of the row that an Update could collide with (not head, epoch or owner); the etag."""
    standbys: int = 0
    """Nodes that follow it all the time; 0: none."""
    migration: str = ""
    """Id of the migration under way, which its owner began under the row's epoch; "" when there is none."""
    migration_target: str = ""
    """Incarnation that it goes to."""
    takeovers: int = 0
    """How many owners in a row lost it while it generated, without its log having grown since the first of them."""
    takeover_head: int = 0
    """Its head when the last one lost it."""


@dataclass(frozen=True, slots=True)
class LogSlice:
    """Consecutive tokens of a session's log, positions `start` to `start + len(token_ids)`."""

    start: int
    token_ids: tuple[int, ...]
    kinds: tuple[Kind, ...]
    logprobs: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling parameters; `seed` is what the generation uses, whoever runs it."""

    temperature: float
    top_k: int
    """0: off."""
    top_p: float
    """1: off."""
    min_p: float
    """0: off."""
    seed: int


@dataclass(frozen=True, slots=True)
class GenerationParams:
    """Everything that, beside the log, decides a generation's tokens and its end."""

    sampling: SamplingParams
    max_tokens: int
    stop_text: tuple[bytes, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRow:
    """A durable generation. The next token is a function of (log, this row)."""

    generation: str
    session: SessionName
    request_id: str
    start: int
    """Position of its first token."""
    params: GenerationParams
    finish: FinishReason | None = None
    end: int | None = None
    """Head when it finished."""
    input_start: int | None = None
    """Head before the input that came in the same call, when there was one."""
    branch: str = ""
    """Branch it started on: after a rewind its tokens are no longer the session's."""


@dataclass(frozen=True, slots=True, order=True)
class ManifestKey:
    """What a manifest is known by: the chain hash, its grid position, and the numerics id that computed the state."""

    chain_hash: bytes
    grid_position: int
    numerics_id: str


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint of a session: position asked for, and the grid manifest that serves it."""

    session: SessionName
    checkpoint: str
    position: int
    grid_position: int
    chain_hash: bytes
    """h(grid_position)."""
    numerics_id: str
    automatic: bool
    create_us: int
    expire_us: int | None = None
    """When retention drops it; None: never for this reason."""

    @property
    def manifest_key(self) -> ManifestKey:
        """Of the manifest that it names."""
        return ManifestKey(self.chain_hash, self.grid_position, self.numerics_id)


@dataclass(frozen=True, slots=True)
class ManifestRow:
    """A manifest, keyed (numerics_id, grid_position, chain_hash); `manifest` is its protobuf bytes."""

    numerics_id: str
    grid_position: int
    chain_hash: bytes
    manifest: bytes
    create_us: int

    @property
    def key(self) -> ManifestKey:
        """What it is known by."""
        return ManifestKey(self.chain_hash, self.grid_position, self.numerics_id)


@dataclass(frozen=True, slots=True)
class ScannedManifest:
    """One step of a scan over all manifests."""

    number: int
    """Above that of every manifest that was written before; a replaced manifest takes a new one."""
    row: ManifestRow
    held: bool
    """A checkpoint names it, or a pin holds it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A manifest that someone is reading: it stays, and so do its blobs."""

    pin: str
    holder: str
    """Incarnation that reads. A pin of one that is not registered any more holds until a collector drops it."""
    key: ManifestKey
    create_us: int = 0


@dataclass(frozen=True, slots=True)
class CollectorRow:
    """Who collects a tier of blobs. `term` fences: it grows with each election. The holder lives while `counter`
    moves, as a lease's."""

    tier: str
    holder: str
    """Empty when nobody collects."""
    term: int
    counter: int
