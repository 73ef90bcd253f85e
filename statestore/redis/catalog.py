"""RedisCatalog: the Catalog port over Redis or Valkey."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Concatenate, ParamSpec, TypeVar

from forkpoint.clock import Clock, SystemClock
from forkpoint.errors import StoreUnavailableError
from forkpoint.ids import SessionName, check_id
from forkpoint.statestore.calls import (
    AppendOutcome,
    AppendTokens,
    BeginGeneration,
    BeginOutcome,
    ForkOutcome,
    ForkSessions,
    StepCommit,
    StepOutcome,
)
from forkpoint.statestore.chain import root_hash
from forkpoint.statestore.findings import Finding
from forkpoint.statestore.records import (
    CheckpointPolicy,
    CheckpointRow,
    CollectorRow,
    Durability,
    GenerationRow,
    LogSlice,
    ManifestKey,
    ManifestRow,
    NewSession,
    NodeRow,
    NodeStatus,
    Pin,
    RequestKey,
    ScannedManifest,
    SessionRow,
    SessionState,
    StoreMarker,
    WorkflowRow,
)
from forkpoint.statestore.redis import (
    checkpoints,
    collection,
    forks,
    generations,
    log,
    manifests,
    migrations,
    nodes,
    requests,
    selfcheck,
    sessions,
    steps,
    workflows,
)
from forkpoint.statestore.redis.access import Access, Heads
from forkpoint.statestore.redis.connection import RedisConnection
from forkpoint.statestore.redis.durability import DurabilityGate
from forkpoint.statestore.redis.functions import Functions
from forkpoint.statestore.redis.keys import KeySpace
from forkpoint.statestore.redis.marker import open_store
from forkpoint.statestore.redis.url import RedisUrl

P = ParamSpec("P")
T = TypeVar("T")


class RedisCatalog:
    """See forkpoint.statestore.base.Catalog. For one event loop. A call that fails for the store's sake leaves the
    catalog usable: it connects anew."""

    def __init__(self, url: RedisUrl, clock: Clock | None = None) -> None:
        self._url = url
        self._clock = clock or SystemClock()
        self._gate = DurabilityGate("catalog", url)
        self._connection: RedisConnection | None = None
        self._durability: Durability | None = None
        self._marker: StoreMarker | None = None
        self._access: Access | None = None
        self._closed = False

    @property
    def durability(self) -> Durability:
        """As the servers are set; known once open."""
        if self._durability is None:
            raise StoreUnavailableError(self._url.shown, "it is not open")
        return self._durability

    @property
    def durability_reason(self) -> str:
        """Why it reaches no more."""
        return self._gate.reason

    @property
    def broken(self) -> str | None:
        return None

    @property
    def marker(self) -> StoreMarker:
        if self._marker is None:
            raise StoreUnavailableError(self._url.shown, "it is not open")
        return self._marker

    async def open(self, marker: StoreMarker) -> None:
        """Besides the port's errors: ConfigError for a server that is too old or evicts keys, and
        DurabilityNotReachedError when it reaches less than the URL asks for."""
        check_id(marker.namespace, "namespace")
        gate = DurabilityGate("catalog", self._url)
        connection = RedisConnection(self._url, gate.greet)
        try:
            await connection.open()
            functions = Functions(connection, self._clock)
            await functions.load_everywhere()
            functions.confirm = gate.confirmation()
            access = Access(functions, KeySpace(marker.namespace), root_hash(marker), Heads())
            await open_store(access, marker)
        except BaseException:
            await connection.close()
            raise
        self._durability = gate.fix()
        self._gate, self._connection, self._marker, self._access = gate, connection, marker, access

    async def close(self) -> None:
        self._closed = True
        if self._connection is not None:
            await self._connection.close()

    async def _run(self, work: Callable[Concatenate[Access, P], Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._access is None or self._closed:
            raise StoreUnavailableError(self._url.shown, "it is closed" if self._closed else "it is not open")
        return await work(self._access, *args, **kwargs)

    # --- nodes -------------------------------------------------------------------------------------------------
    async def register_node(self, node: NodeRow) -> None:
        await self._run(nodes.register, node)

    async def renew_lease(self, incarnation: str, status: NodeStatus | None = None) -> int:
        return await self._run(nodes.renew, incarnation, status)

    async def remove_node(self, incarnation: str) -> None:
        await self._run(nodes.remove, incarnation)

    async def list_nodes(self) -> list[NodeRow]:
        return await self._run(nodes.list_all)

    # --- workflows ---------------------------------------------------------------------------------------------
    async def create_workflow(self, row: WorkflowRow, request: RequestKey | None = None) -> WorkflowRow:
        return await self._run(workflows.create, row, request)

    async def get_workflow(self, workflow: str) -> WorkflowRow:
        return await self._run(workflows.get, workflow)

    async def list_workflows(self, after: str, limit: int) -> list[WorkflowRow]:
        return await self._run(workflows.list_some, after, limit)

    async def update_workflow(
        self, workflow: str, labels: dict[str, str] | None, revision: int | None, standbys: int | None = None
    ) -> WorkflowRow:
        return await self._run(workflows.update, workflow, labels, revision, standbys)

    async def delete_workflow(self, workflow: str) -> None:
        await self._run(workflows.delete, workflow)

    # --- sessions ----------------------------------------------------------------------------------------------
    async def create_session(self, new: NewSession, request: RequestKey | None = None) -> tuple[SessionRow, bool]:
        return await self._run(sessions.create, new, request)

    async def get_session(self, name: SessionName) -> SessionRow:
        return (await self._run(sessions.load, name)).row

    async def list_sessions(
        self, workflow: str | None, after: SessionName | None, limit: int, show_deleted: bool = False
    ) -> list[SessionRow]:
        return await self._run(sessions.list_some, workflow, after, limit, show_deleted)

    async def list_open_generations(self) -> list[SessionRow]:
        return await self._run(sessions.list_open_generations)

    async def update_session(
        self,
        name: SessionName,
        revision: int | None,
        labels: dict[str, str] | None = None,
        policy: CheckpointPolicy | None = None,
        expire_us: int | None = None,
        standbys: int | None = None,
    ) -> SessionRow:
        return await self._run(sessions.update, name, revision, labels, policy, expire_us, standbys)

    async def delete_session(self, name: SessionName, purge_us: int, request: RequestKey | None = None) -> SessionRow:
        return await self._run(sessions.delete, name, purge_us, request)

    async def undelete_session(self, name: SessionName) -> SessionRow:
        return await self._run(sessions.undelete, name)

    async def acquire(
        self, name: SessionName, incarnation: str, expected_epoch: int, request: RequestKey | None = None
    ) -> SessionRow:
        return await self._run(sessions.acquire, name, incarnation, expected_epoch, request)

    async def release(
        self, name: SessionName, epoch: int, state: SessionState, reason: str = "", request: RequestKey | None = None
    ) -> SessionRow:
        return await self._run(sessions.release, name, epoch, state, reason, request)

    async def release_quarantine(self, name: SessionName, request: RequestKey | None = None) -> SessionRow:
        return await self._run(sessions.release_quarantine, name, request)

    async def note_numerics(
        self, name: SessionName, epoch: int, numerics_ids: tuple[str, ...], exact: bool
    ) -> SessionRow:
        return await self._run(sessions.note_numerics, name, epoch, numerics_ids, exact)

    # --- migrations --------------------------------------------------------------------------------------------
    async def begin_migration(self, name: SessionName, epoch: int, migration: str, target: str) -> SessionRow:
        return await self._run(migrations.begin, name, epoch, migration, target)

    async def end_migration(self, name: SessionName, epoch: int, migration: str) -> SessionRow:
        return await self._run(migrations.end, name, epoch, migration)

    async def cut_over(
        self, name: SessionName, epoch: int, migration: str, incarnation: str, head: int, head_hash: bytes
    ) -> SessionRow:
        return await self._run(migrations.cut_over, name, epoch, migration, incarnation, head, head_hash)

    # --- log and generations -----------------------------------------------------------------------------------
    async def append(self, append: AppendTokens) -> AppendOutcome:
        return await self._run(generations.append, append)

    async def begin_generation(self, begin: BeginGeneration) -> BeginOutcome:
        return await self._run(generations.begin, begin)

    async def commit_step(self, commits: Sequence[StepCommit]) -> list[StepOutcome]:
        return await self._run(steps.commit, commits)

    async def open_generation(self, name: SessionName) -> GenerationRow | None:
        return await self._run(generations.open_one, name)

    async def get_generation(self, name: SessionName, generation: str) -> GenerationRow:
        return await self._run(generations.get, name, generation)

    async def list_generations(self, name: SessionName) -> list[GenerationRow]:
        return await self._run(generations.list_own, name)

    async def find_request(self, request: RequestKey) -> str | None:
        return await self._run(requests.find_text, request)

    async def read_log(self, name: SessionName, start: int, limit: int) -> LogSlice:
        return await self._run(log.read, name, start, limit)

    # --- forks -------------------------------------------------------------------------------------------------
    async def fork(self, fork: ForkSessions) -> ForkOutcome:
        return await self._run(forks.fork, fork)

    async def rewind(
        self, name: SessionName, epoch: int, position: int, request: RequestKey | None = None
    ) -> tuple[SessionRow, bool]:
        return await self._run(forks.rewind, name, epoch, position, request)

    # --- checkpoints -------------------------------------------------------------------------------------------
    async def put_checkpoint(
        self,
        row: CheckpointRow,
        manifest: bytes,
        epoch: int,
        request: RequestKey | None = None,
        replace_manifest: bool = False,
        digests: Sequence[str] = (),
        since: int = 0,
    ) -> CheckpointRow:
        return await self._run(checkpoints.put, row, manifest, epoch, request, replace_manifest, digests, since)

    async def list_checkpoints(self, name: SessionName) -> list[CheckpointRow]:
        return await self._run(checkpoints.list_own, name)

    async def get_checkpoint(self, name: SessionName, checkpoint: str) -> tuple[CheckpointRow, bytes]:
        return await self._run(checkpoints.get, name, checkpoint)

    async def delete_checkpoint(
        self, name: SessionName, checkpoint: str, request: RequestKey | None = None
    ) -> CheckpointRow:
        return await self._run(checkpoints.delete, name, checkpoint, request)

    async def find_manifests(self, points: Sequence[tuple[int, bytes]]) -> list[ManifestRow]:
        return await self._run(manifests.find, points)

    # --- retention ---------------------------------------------------------------------------------------------
    async def scan_checkpoints(self, workflow: str, after: tuple[str, str] | None, limit: int) -> list[CheckpointRow]:
        return await self._run(checkpoints.scan, workflow, after, limit)

    async def nearest_checkpoint(
        self, name: SessionName, position: int, numerics_id: str | None = None
    ) -> CheckpointRow | None:
        return await self._run(checkpoints.nearest, name, position, numerics_id)

    async def lineage(self, workflow: str) -> int:
        return await self._run(checkpoints.lineage, workflow)

    async def drop_checkpoints(self, workflow: str, lineage: int, rows: Sequence[tuple[str, str]]) -> bool:
        return await self._run(checkpoints.drop, workflow, lineage, rows)

    # --- collection --------------------------------------------------------------------------------------------
    async def scan_manifests(self, after: int, limit: int) -> list[ScannedManifest]:
        return await self._run(manifests.scan, after, limit)

    async def remove_manifest(self, key: ManifestKey) -> bool:
        return await self._run(manifests.remove, key)

    async def pin(self, pin: Pin) -> None:
        await self._run(manifests.pin, pin)

    async def unpin(self, pin: str) -> None:
        await self._run(manifests.unpin, pin)

    async def list_pins(self) -> list[Pin]:
        return await self._run(manifests.list_pins)

    async def get_collector(self, tier: str) -> CollectorRow:
        return await self._run(collection.get_collector, tier)

    async def list_collectors(self) -> list[CollectorRow]:
        return await self._run(collection.list_collectors)

    async def elect_collector(self, tier: str, holder: str, expected_term: int) -> CollectorRow:
        return await self._run(collection.elect, tier, holder, expected_term)

    async def renew_collector(self, tier: str, term: int) -> int:
        return await self._run(collection.renew, tier, term)

    async def resign_collector(self, tier: str, term: int) -> None:
        await self._run(collection.resign, tier, term)

    async def condemn(self, tier: str, term: int, digests: Sequence[str]) -> None:
        await self._run(collection.condemn, tier, term, digests)

    async def absolve(self, tier: str, term: int, digests: Sequence[str]) -> None:
        await self._run(collection.absolve, tier, term, digests)

    async def list_condemned(self, tier: str, after: str, limit: int) -> list[str]:
        return await self._run(collection.list_condemned, tier, after, limit)

    async def absolutions(self) -> int:
        return await self._run(collection.absolutions)

    async def forget_absolutions(self, upto: int) -> None:
        await self._run(collection.forget, upto)

    # --- check -------------------------------------------------------------------------------------------------
    async def self_check(self) -> list[Finding]:
        """What only this backend can see (forkpoint.statestore.check calls it)."""
        return await self._run(selfcheck.findings)

    async def cancel_reference(self, key: str, reference: str) -> bool:
        """What repairs a LEAKED_REFERENCE, by its finding's subject. False when a checkpoint holds it now."""
        return await self._run(checkpoints.cancel_reference, key, reference)
