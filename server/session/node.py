"""One node's sessions: wires the parts together and answers the calls of server/rpc."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

from forkpoint.clock import Clock, SystemClock
from forkpoint.ids import SessionName, check_id, new_id
from forkpoint.server.engine.base import Engine
from forkpoint.server.session.api import (
    AppendCall,
    AppendResult,
    CheckpointView,
    Chunk,
    CreateSession,
    DrainReport,
    ExportedSession,
    ForkCall,
    GenerateCall,
    GenerateEvent,
    MoveReport,
    NodeEvent,
    NodeView,
    PlannedMove,
    Reader,
    ResumeResult,
    SessionView,
    Usage,
    VerifiedPart,
)
from forkpoint.server.session.checkpoint import Checkpointer
from forkpoint.server.session.checkpoint_calls import CheckpointCalls
from forkpoint.server.session.claims import Claims
from forkpoint.server.session.core import INCARNATION, NodeCore
from forkpoint.server.session.counters import Counters
from forkpoint.server.session.drain import Drainer, Parker
from forkpoint.server.session.elsewhere import Elsewhere
from forkpoint.server.session.engine_thread import EngineThread
from forkpoint.server.session.evict import Residents
from forkpoint.server.session.export import Porter
from forkpoint.server.session.follow import Followers
from forkpoint.server.session.fork import ForkImages
from forkpoint.server.session.garbage import Garbage
from forkpoint.server.session.handover import HandOver
from forkpoint.server.session.inputs import check_labels, check_policy
from forkpoint.server.session.lease import DeathWatch
from forkpoint.server.session.lifecycle import Lifecycle
from forkpoint.server.session.loop import StepLoop
from forkpoint.server.session.membership import Membership
from forkpoint.server.session.migrate import Migrations
from forkpoint.server.session.options import NodeOptions
from forkpoint.server.session.owner import Owners
from forkpoint.server.session.pause import Pauser
from forkpoint.server.session.pins import Pins
from forkpoint.server.session.ports import CutOverAsk, FollowAsk, FollowReport, NoPeers, Peers, TextCodec
from forkpoint.server.session.presence import Presence
from forkpoint.server.session.progress import Progress
from forkpoint.server.session.quarantine import Quarantine
from forkpoint.server.session.rebalance import Balancer
from forkpoint.server.session.recovery import Recovery
from forkpoint.server.session.restore import Restorer
from forkpoint.server.session.settle import Settler
from forkpoint.server.session.shutdown import Shutdown
from forkpoint.server.session.standby import Standbys
from forkpoint.server.session.stream import read_tokens
from forkpoint.server.session.tasks import TaskOwner
from forkpoint.server.session.trials import Trials
from forkpoint.server.session.upkeep import Upkeep
from forkpoint.server.session.usage import UsageCounter
from forkpoint.server.session.views import Views
from forkpoint.server.session.writers import Writers
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.gcreport import CollectionReport
from forkpoint.statestore.records import (
    CheckpointPolicy,
    LogSlice,
    NodeRow,
    RequestKey,
    StoreMarker,
    WorkflowRow,
)

log = logging.getLogger(__name__)


class Node:
    """Implements SessionNode. `catalog` is open; `marker` is what it was opened with.

    `lease_catalog` makes a second, unopened catalog on the same store for the lease keeper's own thread; None: renewals
    go through `catalog` on the node's loop. `presence`: how the lease is kept. `blobs`: open, what the
    node collects garbage in. `peers`: how other nodes are called; None: there are none.
    """

    def __init__(
        self,
        catalog: Catalog,
        checkpoints: CheckpointStore,
        engine: Engine,
        codec: TextCodec,
        options: NodeOptions,
        marker: StoreMarker,
        clock: Clock | None = None,
        lease_catalog: Callable[[], Catalog] | None = None,
        presence: type[Presence] = Presence,
        blobs: BlobStore | None = None,
        peers: Peers | None = None,
    ) -> None:
        clock = clock or SystemClock()
        progress = Progress(clock, options.stall_seconds)
        thread, tasks = EngineThread(engine, progress), TaskOwner(options.node)
        self._core = core = NodeCore(
            catalog, checkpoints, thread, codec, options, clock, new_id(INCARNATION), marker, tasks, progress
        )
        watch = DeathWatch(clock, options.lease_ttl_seconds + options.lease_skew_seconds)
        self._members = members = Membership(core, watch)
        trials = Trials(core)
        self._owners = owners = Owners(core, members, trials)
        checkpointer = Checkpointer(core)
        images = ForkImages(core)
        quarantine = Quarantine(core)
        pins = Pins(catalog, core.incarnation, core.tasks)
        restorer = Restorer(core, pins)
        residents = Residents(core, checkpointer, restorer, images, quarantine)
        settler = Settler(core, owners, checkpointer)
        self._usage = UsageCounter(catalog)
        self._views = Views(core, self._usage)
        self._loop = StepLoop(core, residents, checkpointer, settler, quarantine)
        claims = Claims(core, owners)
        self._writers = Writers(claims, self._usage)
        self._lifecycle = Lifecycle(claims, self._loop, self._usage, images, checkpointer, self._views)
        self._pauser = Pauser(claims, self._loop, residents, checkpointer, self._views)
        self._checkpoints = CheckpointCalls(claims, self._loop, checkpointer, pins)
        self._porter = Porter(claims, self._lifecycle, self._views)
        self._recovery = Recovery(core, owners, members, trials)
        self._upkeep = Upkeep(core, self._lifecycle)
        self._presence = presence(core, members, lease_catalog)
        self._garbage = Garbage(core, blobs)
        elsewhere, peers = Elsewhere(core, members), peers or NoPeers()
        self._followers = Followers(core, members, owners, restorer, residents, self._loop, peers)
        hand_over = HandOver(core, self._loop, owners, peers)
        self._migrations = Migrations(
            claims, self._loop, checkpointer, hand_over, self._views, members, elsewhere, peers
        )
        self._standbys = Standbys(core, elsewhere, peers)
        parker = Parker(claims, self._loop, residents, checkpointer)
        self._drainer = Drainer(core, parker, elsewhere, self._migrations)
        self._balancer = Balancer(core, members)
        self._shutdown = Shutdown(
            core,
            self._loop,
            residents,
            checkpointer,
            images,
            self._presence,
            self._garbage.leave,
            self._followers.close,
        )

    @property
    def counters(self) -> Counters:
        """What happened since the start."""
        return self._core.counters

    @property
    def incarnation(self) -> str:
        """This process's id among the store's nodes."""
        return self._core.incarnation

    @property
    def members(self) -> Membership:
        """The nodes as this one sees them."""
        return self._members

    async def start(self) -> None:
        """Take the lock and the lease, then step and recover."""
        await self._core.tasks.start()
        await self._presence.begin()
        self._core.tasks.spawn(self._core.progress.beat(), "heartbeat")
        self._core.tasks.spawn(self._members.run(), "membership")
        self._core.tasks.spawn(self._members.tell(), "status")
        self._core.tasks.spawn(self._loop.run(), "step loop")
        self._core.tasks.spawn(self._recovery.run(), "recovery")
        self._core.tasks.spawn(self._upkeep.run(), "upkeep")
        self._core.tasks.spawn(self._followers.run(), "followers")
        self._core.tasks.spawn(self._standbys.run(), "standbys")
        self._garbage.start()

    async def move_away(self) -> None:
        """The node is to stop soon: it takes nothing new from now on, and what runs here goes to other nodes, as far as
        there are any and its time allows. It goes on answering meanwhile."""
        await self._shutdown.move_away(self._drainer)

    def begin_leave(self) -> None:
        """The node is about to stop: streams that end from now on end for its sake, not because a caller left."""
        self._core.leaving = True

    async def stop(self) -> None:
        """Leave well: every session checkpointed and released, generations left open, streams ended with a cursor."""
        await self._shutdown.leave()

    async def abandon(self) -> None:
        """Leave as a killed process would: nothing is written or released. For tests of what comes after."""
        await self._shutdown.vanish()

    # --- workflows ----------------------------------------------------------------------------------------------
    async def create_workflow(self, row: WorkflowRow, request: RequestKey | None) -> WorkflowRow:
        check_id(row.workflow, "workflow_id")
        check_labels(row.labels)
        return await self._core.catalog.create_workflow(row, request)

    async def get_workflow(self, workflow: str) -> WorkflowRow:
        return await self._core.catalog.get_workflow(workflow)

    async def list_workflows(self, after: str, limit: int) -> list[WorkflowRow]:
        return await self._core.catalog.list_workflows(after, limit)

    async def update_workflow(
        self, workflow: str, labels: dict[str, str] | None, revision: int | None, standbys: int | None = None
    ) -> WorkflowRow:
        if labels is not None:
            check_labels(labels)
        return await self._core.catalog.update_workflow(workflow, labels, revision, standbys)

    async def delete_workflow(self, workflow: str) -> None:
        await self._core.catalog.delete_workflow(workflow)

    async def workflow_usage(self, workflow: str) -> Usage:
        """Tokens that the workflow's sessions added; what forks share counts once."""
        await self._core.catalog.get_workflow(workflow)
        return await self._views.workflow(workflow)

    # --- sessions -----------------------------------------------------------------------------------------------
    async def create_session(self, call: CreateSession) -> SessionView:
        return await self._core.tasks.run(self._lifecycle.create(call), f"create {call.name}")

    async def get_session(self, name: SessionName) -> SessionView:
        return await self._views.one(await self._core.catalog.get_session(name))

    async def list_sessions(
        self, workflow: str | None, after: SessionName | None, limit: int, show_deleted: bool
    ) -> list[SessionView]:
        return await self._views.many(await self._core.catalog.list_sessions(workflow, after, limit, show_deleted))

    async def update_session(
        self,
        name: SessionName,
        revision: int | None,
        labels: dict[str, str] | None,
        policy: CheckpointPolicy | None,
        expire_us: int | None,
        standbys: int | None = None,
    ) -> SessionView:
        """At the node that owns the session, which goes by it: a live one elsewhere is a SessionRelocatingError."""
        if labels is not None:
            check_labels(labels)
        if policy is not None:
            check_policy(policy)
        await self._owners.only_at_owner(name)
        row = await self._core.catalog.update_session(name, revision, labels, policy, expire_us, standbys)
        live = self._core.lives.get(name)
        if live is not None and live.epoch == row.epoch:
            live.note(row)
        return await self._views.one(row)

    async def delete_session(self, name: SessionName, request: RequestKey | None) -> SessionView:
        return await self._core.tasks.run(self._lifecycle.delete(name, request), f"delete {name}")

    async def undelete_session(self, name: SessionName) -> SessionView:
        return await self._views.one(await self._core.catalog.undelete_session(name))

    async def append(self, call: AppendCall) -> AppendResult:
        return await self._writers.append(call)

    def generate(self, call: GenerateCall, reader: Reader | None = None) -> AsyncIterator[GenerateEvent]:
        return self._writers.generate(call, reader or Reader())

    async def cancel_generation(self, name: SessionName) -> SessionView:
        return await self._core.tasks.run(self._lifecycle.cancel(name), f"cancel {name}")

    def read_tokens(self, name: SessionName, start: int, end: int | None, follow: bool) -> AsyncIterator[Chunk]:
        return read_tokens(self._core, self._owners.foreign_owner, name, start, end, follow)

    async def fork(self, call: ForkCall) -> tuple[list[SessionView], int]:
        return await self._core.tasks.run(self._lifecycle.fork(call), f"fork {call.name}")

    async def rewind(self, name: SessionName, position: int, request: RequestKey | None) -> SessionView:
        return await self._core.tasks.run(self._lifecycle.rewind(name, position, request), f"rewind {name}")

    async def pause(self, name: SessionName, request: RequestKey | None) -> SessionView:
        return await self._core.tasks.run(self._pauser.pause(name, request), f"pause {name}")

    async def resume(self, name: SessionName, request: RequestKey | None) -> ResumeResult:
        return await self._core.tasks.run(self._pauser.resume(name, request), f"resume {name}")

    # --- checkpoints --------------------------------------------------------------------------------------------
    async def create_checkpoint(
        self, name: SessionName, checkpoint: str, request: RequestKey | None, expire_us: int | None = None
    ) -> CheckpointView:
        work = self._checkpoints.create(name, checkpoint, request, expire_us)
        return await self._core.tasks.run(work, f"checkpoint {name}")

    async def get_checkpoint(self, name: SessionName, checkpoint: str) -> CheckpointView:
        return await self._checkpoints.get(name, checkpoint)

    async def list_checkpoints(self, name: SessionName) -> list[CheckpointView]:
        return await self._checkpoints.list(name)

    async def delete_checkpoint(self, name: SessionName, checkpoint: str, request: RequestKey | None) -> CheckpointView:
        work = self._checkpoints.delete(name, checkpoint, request)
        return await self._core.tasks.run(work, f"delete a checkpoint of {name}")

    def verify_checkpoint(self, name: SessionName, checkpoint: str) -> AsyncIterator[VerifiedPart]:
        return self._checkpoints.verify(name, checkpoint)

    # --- export, nodes ------------------------------------------------------------------------------------------
    async def export_head(self, name: SessionName) -> ExportedSession:
        return await self._porter.head(name)

    def export_log(self, name: SessionName) -> AsyncIterator[LogSlice]:
        return self._porter.log(name)

    async def import_session(
        self, name: SessionName, head: ExportedSession, slices: AsyncIterator[LogSlice], request: RequestKey | None
    ) -> SessionView:
        return await self._core.tasks.run(self._porter.take_in(name, head, slices, request), f"import {name}")

    def collect_garbage(self, dry_run: bool) -> AsyncIterator[CollectionReport]:
        return self._garbage.collect(dry_run)

    @property
    def stalled(self) -> str:
        """What of the node's work does not get on; "" while all does."""
        return self._core.progress.stalled

    async def list_nodes(self) -> Sequence[NodeView]:
        await self._members.refresh()
        return self._members.views()

    def watch_nodes(self) -> AsyncIterator[NodeEvent]:
        return self._members.watch()

    async def release_quarantine(self, name: SessionName, request: RequestKey | None) -> SessionView:
        row = await self._core.catalog.release_quarantine(name, request)
        self._recovery.again()
        return await self._views.one(row)

    @property
    def others(self) -> Sequence[NodeRow]:
        """The other nodes that are not known to be dead, as of the last look."""
        return [node for node in self._members.living() if node.incarnation != self._core.incarnation]

    def migrate(self, name: SessionName, target: str) -> AsyncGenerator[MoveReport, None]:
        return self._migrations.migrate(name, target)

    def follow(self, ask: FollowAsk) -> AsyncGenerator[FollowReport, None]:
        return self._followers.follow(ask)

    async def cut_over(self, ask: CutOverAsk) -> int:
        return await self._followers.cut_over(ask)

    def drain(self) -> AsyncIterator[DrainReport]:
        return self._drainer.drain()

    async def undrain(self) -> None:
        await self._drainer.uncordon()

    async def plan_rebalance(self, moves_max: int) -> list[PlannedMove]:
        return await self._balancer.plan(moves_max)
