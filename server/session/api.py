"""The session layer's surface: what server/rpc calls. Plain values in, plain values or async iterators out.

All methods raise forkpoint.errors; none knows gRPC. Cancelling the iterator of `generate` detaches the reader and
leaves the generation running, unless the call said cancel_on_disconnect.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from forkpoint.chat import Chat
from forkpoint.ids import SessionName
from forkpoint.server.session.placement import NodeState
from forkpoint.server.session.ports import CutOverAsk, FollowAsk, FollowReport
from forkpoint.statestore.calls import AppendOutcome
from forkpoint.statestore.gcreport import CollectionReport
from forkpoint.statestore.records import (
    CheckpointPolicy,
    CheckpointRow,
    Durability,
    FinishReason,
    GenerationRow,
    Kind,
    LogSlice,
    NodeRow,
    RequestKey,
    SessionRow,
    WorkflowRow,
)


@dataclass(frozen=True, slots=True)
class Input:
    """At most one of the three is set; all None: no input."""

    token_ids: tuple[int, ...] | None = None
    text: bytes | None = None
    chat: Chat | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of the session's log by kind, its ancestors' included."""

    prompt_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class SessionView:
    """A row with the live facts of its owner. `state` is the API's state name (ACTIVE, GENERATING, PAUSED, ...)."""

    row: SessionRow
    state: str
    consumed: int
    node: str
    recovery_time_estimate_s: float
    usage: Usage


@dataclass(frozen=True, slots=True)
class CreateSession:
    """`seed` None: drawn at random and stored. `every_tokens` None: the server's default."""

    name: SessionName
    seed: int | None = None
    policy: CheckpointPolicy | None = None
    labels: dict[str, str] = field(default_factory=dict)
    transient: bool = False
    expire_us: int | None = None
    request: RequestKey | None = None
    standbys: int = 0
    """0: as many as the workflow says."""


@dataclass(frozen=True, slots=True)
class AppendCall:
    """One append."""

    name: SessionName
    input: Input
    expected_position: int | None = None
    expected_head_hash: bytes | None = None
    durability: Durability | None = None
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class AppendResult:
    """Where the append's tokens lie, and which they are."""

    outcome: AppendOutcome
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """One generation; the same `request` re-attaches, also after it finished. `resume_position` None: its start."""

    name: SessionName
    request: RequestKey
    input: Input = Input()
    expected_position: int | None = None
    expected_head_hash: bytes | None = None
    resume_position: int | None = None
    max_tokens: int = 0
    """0: up to the context limit."""
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_text: tuple[bytes, ...] = ()
    stop_ids: tuple[int, ...] = ()
    logprobs: bool = False
    cancel_on_disconnect: bool = False


@dataclass(slots=True)
class Reader:
    """Who reads a generation's events. `sent_away`: when it closes them from now on it is the node's doing; it is asked
    to come again, so that cancel_on_disconnect does not cancel."""

    sent_away: bool = False


@dataclass(frozen=True, slots=True)
class Started:
    """First event of every attach."""

    row: GenerationRow
    head: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """Durable tokens from `start`. `text` holds whole characters only, less what may begin a stop string."""

    start: int
    token_ids: tuple[int, ...]
    kinds: tuple[Kind, ...]
    text: bytes
    logprobs: tuple[float | None, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event. `stop_position`: first position of the stop (string or id), -1 when none."""

    reason: FinishReason
    head: int
    head_hash: bytes
    usage: Usage
    stop_position: int


GenerateEvent = Started | Chunk | Finished


@dataclass(frozen=True, slots=True)
class ForkCall:
    """`count` children at `position` (None: the head). One child inherits the seed, more derive theirs, unless
    `seeds` says otherwise ("inherit" or "derive")."""

    name: SessionName
    count: int
    position: int | None = None
    session_ids: tuple[str, ...] = ()
    seeds: str = ""
    transient: bool = False
    expire_us: int | None = None
    request: RequestKey | None = None


@dataclass(frozen=True, slots=True)
class ResumeResult:
    """What a resume did."""

    view: SessionView
    restored_tokens: int
    replayed_tokens: int
    restored_bytes: int
    source: str
    exact: bool


class MovePhase(Enum):
    """What a move is doing; the names are the API's."""

    RESTORING = "RESTORING"
    """The target loads a checkpoint."""
    REPLAYING = "REPLAYING"
    """It replays the log, while the source goes on."""
    CUTTING_OVER = "CUTTING_OVER"
    MOVED = "MOVED"


@dataclass(frozen=True, slots=True)
class MoveReport:
    """How far a move to the node `target` is. `lag_tokens`: committed, and not consumed there. `view` and
    `pause_seconds` (how long no token could be committed) come with the last one."""

    phase: MovePhase
    target: str
    restored_tokens: int = 0
    lag_tokens: int = 0
    view: SessionView | None = None
    pause_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class CheckpointPart:
    """One part as stored."""

    name: str
    bytes: int
    blake3: str


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """A checkpoint with its parts. Stored and shared bytes are of the call that wrote it, 0 when read later."""

    row: CheckpointRow
    parts: tuple[CheckpointPart, ...]
    numerics_ids: tuple[str, ...]
    bytes_stored: int
    bytes_shared: int
    durability: Durability | None = None
    """The class that row and blobs both reach; None of one that is deleted."""


@dataclass(frozen=True, slots=True)
class VerifiedPart:
    """Outcome for one part; `problem` "" when it is sound."""

    part: CheckpointPart
    problem: str


@dataclass(frozen=True, slots=True)
class ExportedSession:
    """Head of an export: what an import needs beside the log."""

    row: SessionRow
    model_digest: bytes
    tokenizer_digest: bytes
    namespace: str
    generations: tuple[GenerationRow, ...]


@dataclass(frozen=True, slots=True)
class DrainReport:
    """How far a drain is: sessions that are here, that other nodes have, and that were checkpointed and given up."""

    left: int
    moved: int
    parked: int


@dataclass(frozen=True, slots=True)
class PlannedMove:
    """One running session from node to node."""

    name: SessionName
    source: NodeRow
    target: NodeRow


@dataclass(frozen=True, slots=True)
class NodeView:
    """A node's row, and what may be sent to it."""

    row: NodeRow
    state: NodeState


@dataclass(frozen=True, slots=True)
class NodeEvent:
    """A node as it is now; `gone`: as it was, its incarnation is not known any more."""

    node: NodeView
    gone: bool = False


class SessionNode(Protocol):
    """One node's sessions. Implemented by server/session/node.py."""

    @property
    def incarnation(self) -> str: ...
    async def create_workflow(self, row: WorkflowRow, request: RequestKey | None) -> WorkflowRow: ...
    async def get_workflow(self, workflow: str) -> WorkflowRow: ...
    async def list_workflows(self, after: str, limit: int) -> list[WorkflowRow]: ...
    async def update_workflow(
        self, workflow: str, labels: dict[str, str] | None, revision: int | None, standbys: int | None = None
    ) -> WorkflowRow: ...
    async def delete_workflow(self, workflow: str) -> None: ...
    async def workflow_usage(self, workflow: str) -> Usage: ...
    async def create_session(self, call: CreateSession) -> SessionView: ...
    async def get_session(self, name: SessionName) -> SessionView: ...
    async def list_sessions(
        self, workflow: str | None, after: SessionName | None, limit: int, show_deleted: bool
    ) -> list[SessionView]: ...
    async def update_session(
        self,
        name: SessionName,
        revision: int | None,
        labels: dict[str, str] | None,
        policy: CheckpointPolicy | None,
        expire_us: int | None,
        standbys: int | None = None,
    ) -> SessionView: ...
    async def delete_session(self, name: SessionName, request: RequestKey | None) -> SessionView: ...
    async def undelete_session(self, name: SessionName) -> SessionView: ...
    async def append(self, call: AppendCall) -> AppendResult: ...
    def generate(self, call: GenerateCall, reader: Reader | None = None) -> AsyncIterator[GenerateEvent]: ...
    async def cancel_generation(self, name: SessionName) -> SessionView: ...
    def read_tokens(self, name: SessionName, start: int, end: int | None, follow: bool) -> AsyncIterator[Chunk]: ...
    async def fork(self, call: ForkCall) -> tuple[list[SessionView], int]: ...
    async def rewind(self, name: SessionName, position: int, request: RequestKey | None) -> SessionView: ...
    async def pause(self, name: SessionName, request: RequestKey | None) -> SessionView: ...
    async def resume(self, name: SessionName, request: RequestKey | None) -> ResumeResult: ...
    async def create_checkpoint(
        self, name: SessionName, checkpoint: str, request: RequestKey | None, expire_us: int | None = None
    ) -> CheckpointView: ...
    async def get_checkpoint(self, name: SessionName, checkpoint: str) -> CheckpointView: ...
    async def list_checkpoints(self, name: SessionName) -> list[CheckpointView]: ...
    async def delete_checkpoint(
        self, name: SessionName, checkpoint: str, request: RequestKey | None
    ) -> CheckpointView: ...
    def collect_garbage(self, dry_run: bool) -> AsyncIterator[CollectionReport]: ...
    def verify_checkpoint(self, name: SessionName, checkpoint: str) -> AsyncIterator[VerifiedPart]: ...
    async def export_head(self, name: SessionName) -> ExportedSession: ...
    def export_log(self, name: SessionName) -> AsyncIterator[LogSlice]: ...
    async def import_session(
        self, name: SessionName, head: ExportedSession, slices: AsyncIterator[LogSlice], request: RequestKey | None
    ) -> SessionView: ...
    @property
    def stalled(self) -> str: ...
    async def list_nodes(self) -> Sequence[NodeView]: ...
    def watch_nodes(self) -> AsyncIterator[NodeEvent]: ...
    async def release_quarantine(self, name: SessionName, request: RequestKey | None) -> SessionView: ...
    def migrate(self, name: SessionName, target: str) -> AsyncGenerator[MoveReport, None]: ...
    def follow(self, ask: FollowAsk) -> AsyncGenerator[FollowReport, None]: ...
    async def cut_over(self, ask: CutOverAsk) -> int: ...
    def drain(self) -> AsyncIterator[DrainReport]: ...
    async def undrain(self) -> None: ...
    async def plan_rebalance(self, moves_max: int) -> list[PlannedMove]: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
