"""SqliteCatalog: the Catalog port over one SQLite file."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import apsw

from forkpoint.clock import Clock, SystemClock
from forkpoint.errors import StoreUnavailableError
from forkpoint.ids import SessionName
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
from forkpoint.statestore.rules import check_marker
from forkpoint.statestore.sqlite import (
    checkpoints,
    collection,
    forks,
    generations,
    log,
    marker,
    migrations,
    nodes,
    requests,
    retention,
    selfcheck,
    sessions,
    workflows,
)
from forkpoint.statestore.sqlite.connection import SqliteConnection
from forkpoint.statestore.sqlite.group import GroupCommit
from forkpoint.statestore.sqlite.step import Steps
from forkpoint.statestore.sqlite.tx import Tx

P = ParamSpec("P")
T = TypeVar("T")


class SqliteCatalog:
    """See forkpoint.statestore.base.Catalog. `vfs` and `synchronous` are for tests of durability."""

    def __init__(
        self, path: Path, clock: Clock | None = None, *, vfs: str | None = None, synchronous: str = "FULL"
    ) -> None:
        self._connection = SqliteConnection(path, vfs, synchronous)
        self._group = GroupCommit(self._connection)
        self._steps = Steps(self._connection)
        self._clock = clock or SystemClock()
        self._marker: StoreMarker | None = None
        self._root = b""

    @property
    def durability(self) -> Durability:
        return Durability.LOCAL_FSYNC

    @property
    def broken(self) -> str | None:
        return self._connection.broken

    @property
    def marker(self) -> StoreMarker:
        if self._marker is None:
            raise StoreUnavailableError(str(self._connection.path), "it is not open")
        return self._marker

    async def open(self, marker: StoreMarker) -> None:
        self._root = root_hash(marker)
        await self._connection.run(self._open, marker)
        self._marker = marker

    def _open(self, ours: StoreMarker) -> None:
        self._connection.connect()
        with self._connection.transaction("BEGIN IMMEDIATE") as db:
            stored = marker.read_or_create(db, ours)
        check_marker(stored, ours)

    async def close(self) -> None:
        await self._connection.close()

    async def _write(self, work: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._group.run(lambda db: self._change(db, lambda tx: work(tx, *args, **kwargs)))

    def _change(self, db: apsw.Connection, work: Callable[[Tx], T]) -> T:
        self._steps.forget()
        return work(self._tx(db))

    async def _read(self, work: Callable[Concatenate[Tx, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._connection.run(self._look, lambda tx: work(tx, *args, **kwargs))

    def _look(self, work: Callable[[Tx], T]) -> T:
        with self._connection.transaction("BEGIN") as db:
            return work(self._tx(db))

    def _tx(self, db: apsw.Connection) -> Tx:
        return Tx(db, self._clock.wall_us(), self._root)

    # --- nodes -------------------------------------------------------------------------------------------------
    async def register_node(self, node: NodeRow) -> None:
        await self._write(nodes.register, node)

    async def renew_lease(self, incarnation: str, status: NodeStatus | None = None) -> int:
        return await self._write(nodes.renew, incarnation, status)

    async def remove_node(self, incarnation: str) -> None:
        await self._write(nodes.remove, incarnation)

    async def list_nodes(self) -> list[NodeRow]:
        return await self._read(nodes.list_all)

    # --- workflows ---------------------------------------------------------------------------------------------
    async def create_workflow(self, row: WorkflowRow, request: RequestKey | None = None) -> WorkflowRow:
        return await self._write(workflows.create, row, request)

    async def get_workflow(self, workflow: str) -> WorkflowRow:
        return await self._read(workflows.get, workflow)

    async def list_workflows(self, after: str, limit: int) -> list[WorkflowRow]:
        return await self._read(workflows.list_some, after, limit)

    async def update_workflow(
        self, workflow: str, labels: dict[str, str] | None, revision: int | None, standbys: int | None = None
    ) -> WorkflowRow:
        return await self._write(workflows.update, workflow, labels, revision, standbys)

    async def delete_workflow(self, workflow: str) -> None:
        await self._write(workflows.delete, workflow)

    # --- sessions ----------------------------------------------------------------------------------------------
    async def create_session(self, new: NewSession, request: RequestKey | None = None) -> tuple[SessionRow, bool]:
        return await self._write(sessions.create, new, request)

    async def get_session(self, name: SessionName) -> SessionRow:
        return (await self._read(sessions.load, name)).row

    async def list_sessions(
        self, workflow: str | None, after: SessionName | None, limit: int, show_deleted: bool = False
    ) -> list[SessionRow]:
        return await self._read(sessions.list_some, workflow, after, limit, show_deleted)

    async def list_open_generations(self) -> list[SessionRow]:
        return await self._read(sessions.list_open_generations)

    async def update_session(
        self,
        name: SessionName,
        revision: int | None,
        labels: dict[str, str] | None = None,
        policy: CheckpointPolicy | None = None,
        expire_us: int | None = None,
        standbys: int | None = None,
    ) -> SessionRow:
        return await self._write(sessions.update, name, revision, labels, policy, expire_us, standbys)

    async def delete_session(self, name: SessionName, purge_us: int, request: RequestKey | None = None) -> SessionRow:
        return await self._write(sessions.delete, name, purge_us, request)

    async def undelete_session(self, name: SessionName) -> SessionRow:
        return await self._write(sessions.undelete, name)

    async def acquire(
        self, name: SessionName, incarnation: str, expected_epoch: int, request: RequestKey | None = None
    ) -> SessionRow:
        return await self._write(sessions.acquire, name, incarnation, expected_epoch, request)

    async def release(
        self, name: SessionName, epoch: int, state: SessionState, reason: str = "", request: RequestKey | None = None
    ) -> SessionRow:
        return await self._write(sessions.release, name, epoch, state, reason, request)

    async def release_quarantine(self, name: SessionName, request: RequestKey | None = None) -> SessionRow:
        return await self._write(sessions.release_quarantine, name, request)

    async def note_numerics(
        self, name: SessionName, epoch: int, numerics_ids: tuple[str, ...], exact: bool
    ) -> SessionRow:
        return await self._write(sessions.note_numerics, name, epoch, numerics_ids, exact)

    # --- migrations --------------------------------------------------------------------------------------------
    async def begin_migration(self, name: SessionName, epoch: int, migration: str, target: str) -> SessionRow:
        return await self._write(migrations.begin, name, epoch, migration, target)

    async def end_migration(self, name: SessionName, epoch: int, migration: str) -> SessionRow:
        return await self._write(migrations.end, name, epoch, migration)

    async def cut_over(
        self, name: SessionName, epoch: int, migration: str, incarnation: str, head: int, head_hash: bytes
    ) -> SessionRow:
        return await self._write(migrations.cut_over, name, epoch, migration, incarnation, head, head_hash)

    # --- log and generations -----------------------------------------------------------------------------------
    async def append(self, append: AppendTokens) -> AppendOutcome:
        return await self._write(generations.append, append)

    async def begin_generation(self, begin: BeginGeneration) -> BeginOutcome:
        return await self._write(generations.begin, begin)

    async def commit_step(self, commits: Sequence[StepCommit]) -> list[StepOutcome]:
        return await self._group.run(lambda db: self._steps.commit(self._tx(db), commits))

    async def open_generation(self, name: SessionName) -> GenerationRow | None:
        return await self._read(generations.open_one, name)

    async def get_generation(self, name: SessionName, generation: str) -> GenerationRow:
        return await self._read(generations.get, name, generation)

    async def list_generations(self, name: SessionName) -> list[GenerationRow]:
        return await self._read(generations.list_own, name)

    async def find_request(self, request: RequestKey) -> str | None:
        return await self._read(requests.find_text, request)

    async def read_log(self, name: SessionName, start: int, limit: int) -> LogSlice:
        return await self._read(log.read, name, start, limit)

    # --- forks -------------------------------------------------------------------------------------------------
    async def fork(self, fork: ForkSessions) -> ForkOutcome:
        return await self._write(forks.fork, fork)

    async def rewind(
        self, name: SessionName, epoch: int, position: int, request: RequestKey | None = None
    ) -> tuple[SessionRow, bool]:
        return await self._write(forks.rewind, name, epoch, position, request)

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
        return await self._write(checkpoints.put, row, manifest, epoch, request, replace_manifest, digests, since)

    async def list_checkpoints(self, name: SessionName) -> list[CheckpointRow]:
        return await self._read(checkpoints.list_own, name)

    async def get_checkpoint(self, name: SessionName, checkpoint: str) -> tuple[CheckpointRow, bytes]:
        return await self._read(checkpoints.get, name, checkpoint)

    async def delete_checkpoint(
        self, name: SessionName, checkpoint: str, request: RequestKey | None = None
    ) -> CheckpointRow:
        return await self._write(checkpoints.delete, name, checkpoint, request)

    async def find_manifests(self, points: Sequence[tuple[int, bytes]]) -> list[ManifestRow]:
        return await self._read(checkpoints.find_manifests, points)

    # --- retention ---------------------------------------------------------------------------------------------
    async def scan_checkpoints(self, workflow: str, after: tuple[str, str] | None, limit: int) -> list[CheckpointRow]:
        return await self._read(retention.scan, workflow, after, limit)

    async def nearest_checkpoint(
        self, name: SessionName, position: int, numerics_id: str | None = None
    ) -> CheckpointRow | None:
        return await self._read(retention.nearest, name, position, numerics_id)

    async def lineage(self, workflow: str) -> int:
        return await self._read(retention.lineage, workflow)

    async def drop_checkpoints(self, workflow: str, lineage: int, rows: Sequence[tuple[str, str]]) -> bool:
        return await self._write(retention.drop, workflow, lineage, rows)

    # --- collection --------------------------------------------------------------------------------------------
    async def scan_manifests(self, after: int, limit: int) -> list[ScannedManifest]:
        return await self._read(collection.scan_manifests, after, limit)

    async def remove_manifest(self, key: ManifestKey) -> bool:
        return await self._write(collection.remove_manifest, key)

    async def pin(self, pin: Pin) -> None:
        await self._write(collection.pin, pin)

    async def unpin(self, pin: str) -> None:
        await self._write(collection.unpin, pin)

    async def list_pins(self) -> list[Pin]:
        return await self._read(collection.list_pins)

    async def get_collector(self, tier: str) -> CollectorRow:
        return await self._read(collection.get_collector, tier)

    async def list_collectors(self) -> list[CollectorRow]:
        return await self._read(collection.list_collectors)

    async def elect_collector(self, tier: str, holder: str, expected_term: int) -> CollectorRow:
        return await self._write(collection.elect, tier, holder, expected_term)

    async def renew_collector(self, tier: str, term: int) -> int:
        return await self._write(collection.renew, tier, term)

    async def resign_collector(self, tier: str, term: int) -> None:
        await self._write(collection.resign, tier, term)

    async def condemn(self, tier: str, term: int, digests: Sequence[str]) -> None:
        await self._write(collection.condemn, tier, term, digests)

    async def absolve(self, tier: str, term: int, digests: Sequence[str]) -> None:
        await self._write(collection.absolve, tier, term, digests)

    async def list_condemned(self, tier: str, after: str, limit: int) -> list[str]:
        return await self._read(collection.list_condemned, tier, after, limit)

    async def absolutions(self) -> int:
        return await self._read(collection.absolutions)

    async def forget_absolutions(self, upto: int) -> None:
        await self._write(collection.forget, upto)

    # --- check -------------------------------------------------------------------------------------------------
    async def self_check(self) -> list[Finding]:
        """What only this backend can see (forkpoint.statestore.check calls it)."""
        return await self._read(selfcheck.findings)
