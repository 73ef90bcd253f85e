"""A store and the nodes on it, for tests of the session layer."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from forkpoint.clock import Clock
from forkpoint.ids import SessionName
from forkpoint.server.session.api import (
    AppendCall,
    AppendResult,
    Chunk,
    CreateSession,
    Finished,
    ForkCall,
    GenerateCall,
    GenerateEvent,
    Input,
    Started,
)
from forkpoint.server.session.node import Node
from forkpoint.server.session.options import NodeOptions
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import (
    SCHEMA_VERSION,
    CheckpointPolicy,
    FinishReason,
    RequestKey,
    StoreMarker,
    WorkflowRow,
)
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.support.hash_engine import ByteCodec, HashEngine
from tests.support.lasting_faults import LastingFaults
from tests.support.near_peers import Street

T = TypeVar("T")
MARKER = StoreMarker(SCHEMA_VERSION, "default", b"m" * 32, b"t" * 32)
WORKFLOW = "w"
PATIENCE_SECONDS = 10.0
"""No wait of these tests takes long: what hangs must fail."""

FAST = NodeOptions(
    node="n",
    checkpoint_every_tokens=32,
    prefill_chunk_tokens=40,
    lease_renew_seconds=0.05,
    lease_ttl_seconds=0.2,
    lease_skew_seconds=0.05,
    watch_seconds=0.02,
    recovery_rank_seconds=0.05,
    recovery_look_seconds=0.3,
    recovery_poll_seconds=0.02,
    sweep_seconds=0.05,
    retry_first_seconds=0.01,
    retry_most_seconds=0.05,
    shutdown_seconds=5.0,
)


def key(request_id: str, content: str = "", caller: str = "tester") -> RequestKey:
    """A request key whose digest stands for the content."""
    return RequestKey(caller, WORKFLOW, request_id, (content or request_id).encode())


@dataclass
class Site:
    """One store. Nodes come and go; every node has an engine of its own."""

    folder: Path
    backend: str
    memory: MemoryCatalog = field(default_factory=MemoryCatalog)
    blobs: BlobStore = field(default_factory=MemoryBlobs)
    nodes: list["Running"] = field(default_factory=list)
    street: Street = field(default_factory=Street)
    numbers: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        if self.backend == "sqlite":
            self.blobs = FileBlobs(self.folder / "blobs")

    async def node(
        self,
        engine: HashEngine | None = None,
        clock: Clock | None = None,
        options: NodeOptions = FAST,
        lock: bool = True,
        own_lease: bool = False,
        name: str = "",
    ) -> "Running":
        """Start a node on the store, under a name of its own unless one is given."""
        engine = engine or HashEngine()
        catalog: Catalog = self.memory
        if self.backend == "sqlite":
            catalog = SqliteCatalog(self.folder / "catalog.db")
        marker = replace(MARKER, model_digest=engine.facts.model_digest)
        await catalog.open(marker)
        faults = LastingFaults(catalog)
        options = replace(
            options,
            node=name or f"n{next(self.numbers)}",
            address=f"host:{next(self.numbers)}",
            lock_folder=self.folder / "locks" if lock else None,
        )
        lease = (lambda: SqliteCatalog(self.folder / "catalog.db")) if own_lease else None
        store = CheckpointStore(faults.port, self.blobs)
        peers = self.street.peers(options.address)
        node = Node(
            faults.port, store, engine, ByteCodec(), options, marker, clock, lease, blobs=self.blobs, peers=peers
        )
        await node.start()
        self.street.nodes[options.address] = node
        running = Running(self, node, engine, catalog, options, faults)
        self.nodes.append(running)
        return running

    async def close(self) -> None:
        """Stop what still runs; the engines must have everything back."""
        for running in list(self.nodes):
            await running.stop()
            assert running.engine.sequences == {}, "the engine holds sequences that nobody has"


@dataclass
class Running:
    """A node with its engine, and shorthand for calls."""

    site: Site
    node: Node
    engine: HashEngine
    catalog: Catalog
    options: NodeOptions
    faults: LastingFaults

    async def stop(self) -> None:
        """As SIGTERM."""
        self.site.nodes.remove(self)
        await self.node.stop()
        del self.site.street.nodes[self.options.address]
        await self._close()

    async def crash(self) -> None:
        """As SIGKILL."""
        self.site.nodes.remove(self)
        del self.site.street.nodes[self.options.address]
        abandoning = background(self.node.abandon())
        if not (await asyncio.wait([abandoning], timeout=0.1))[0]:
            # Work that is cut off waits for the engine's thread, which a killed process has no more.
            self.engine.bury()
        await abandoning
        await self._close()

    async def _close(self) -> None:
        if self.site.backend == "sqlite":
            await self.catalog.close()

    async def workflow(self) -> None:
        """The workflow that all test sessions are in."""
        await self.node.create_workflow(WorkflowRow(WORKFLOW), None)

    async def session(self, name: str, seed: int | None = 7, policy: CheckpointPolicy | None = None) -> SessionName:
        """A new session."""
        view = await self.node.create_session(CreateSession(SessionName(WORKFLOW, name), seed, policy))
        return view.row.name

    async def append(self, name: SessionName, tokens: Sequence[int] | bytes, request: str = "") -> AppendResult:
        """Append token ids."""
        given = Input(token_ids=tuple(tokens))
        return await self.node.append(AppendCall(name, given, request=key(request) if request else None))

    async def generate(self, call: GenerateCall) -> "Read":
        """Read a generation to its end."""
        read = Read()
        async with asyncio.timeout(PATIENCE_SECONDS):
            async for event in self.node.generate(call):
                read.take(event)
        return read

    def reading(self, call: GenerateCall) -> "tuple[Read, asyncio.Task[None]]":
        """Read a generation beside the test, which looks at what came so far."""
        read = Read()

        async def consume() -> None:
            async for event in self.node.generate(call):
                read.take(event)

        return read, background(consume())

    async def fork(self, name: SessionName, *children: str, position: int | None = None) -> list[SessionName]:
        """Named children."""
        views, _ = await self.node.fork(ForkCall(name, len(children), position, children))
        return [view.row.name for view in views]

    async def log(self, name: SessionName) -> list[int]:
        """All committed tokens."""
        return [token async for chunk in self.node.read_tokens(name, 0, None, False) for token in chunk.token_ids]

    async def idle(self, name: SessionName) -> None:
        """Wait until the session's state is at its head and nothing runs."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while True:
                view = await self.node.get_session(name)
                if view.state == "ACTIVE" and view.consumed == view.row.head:
                    return
                await asyncio.sleep(0.002)


@dataclass
class Read:
    """What one reader got."""

    started: Started | None = None
    tokens: list[int] = field(default_factory=list)
    text: bytes = b""
    logprobs: list[float | None] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    finished: Finished | None = None

    @property
    def reason(self) -> FinishReason | None:
        return None if self.finished is None else self.finished.reason

    @property
    def position(self) -> int:
        """Where a re-attach goes on."""
        assert self.started is not None
        return (
            self.started.row.start + len(self.tokens)
            if not self.chunks
            else self.chunks[-1].start + len(self.chunks[-1].token_ids)
        )

    def take(self, event: GenerateEvent) -> None:
        """Note one event; chunks must follow one another."""
        assert self.finished is None, "an event after the last"
        if isinstance(event, Started):
            assert not self.chunks
            self.started = event
        elif isinstance(event, Chunk):
            assert self.started is not None
            assert not self.chunks or event.start == self.position, "a gap in the stream"
            assert len(event.token_ids) == len(event.kinds) == len(event.logprobs)
            self.chunks.append(event)
            self.tokens += event.token_ids
            self.text += event.text
            self.logprobs += event.logprobs
        else:
            self.finished = event


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():
            await asyncio.sleep(0.002)


def background(work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """Run beside the test."""
    return asyncio.get_running_loop().create_task(work)  # owner: the test that awaits it
