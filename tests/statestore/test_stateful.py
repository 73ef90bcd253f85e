"""Any sequence of calls against a model that fits on a page: logs are lists, checkpoints are functions of a prefix."""

import asyncio
import hashlib
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from forkpoint.errors import NotFoundError, StaleEpochError
from forkpoint.parts import PartSpec
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit, StepStatus
from forkpoint.statestore.chain import HashChain, grid_hashes, root_hash
from forkpoint.statestore.check import Severity, check
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.gc import Collector, CollectorOptions
from forkpoint.statestore.records import FinishReason, NodeRow, Pin, SessionState, WorkflowRow
from forkpoint.statestore.retention import RetentionPolicy
from tests.conformance.backends import Backend, backends
from tests.support.store import MARKER, PARAMS, ManualClock, name, new, request

T = TypeVar("T")
SPEC = PartSpec("kda.000.state.0", "uint8", (32,))
LABELS = ("memory", "sqlite", "valkey")
EXAMPLES = {"memory": 20, "sqlite": 4, "valkey": 2}
STEPS = 40

tokens_of = st.lists(st.integers(0, 500), min_size=1, max_size=24)
some = st.integers(0, 10_000)


@dataclass
class Modelled:
    """One session: its log, and its checkpoints as the prefixes whose states they hold."""

    tokens: list[int] = field(default_factory=list)
    epoch: int = 0
    deleted: bool = False
    checkpoints: dict[str, list[int]] = field(default_factory=dict)
    """Those that a caller asked for: retention never takes them."""

    def head_hash(self) -> bytes:
        chain = HashChain.root(MARKER)
        chain.extend(self.tokens)
        return chain.head_hash()


def state(prefix: list[int]) -> bytes:
    """The state after a prefix."""
    return hashlib.sha256(repr(prefix).encode()).digest()


class StoreMachine(RuleBasedStateMachine):
    """Sessions, forks, rewinds, checkpoints, pins and a collector on one store."""

    backend: Backend

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.loop = asyncio.new_event_loop()
        self.clock = ManualClock()
        self.sessions: dict[str, Modelled] = {}
        self.pinned: dict[str, list[int]] = {}
        self.count = 0
        self.last_append: tuple[AppendTokens, int] | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)

    def pick(self, number: int, deleted: bool = False) -> tuple[str, Modelled]:
        """One of the sessions that are (or are not) deleted."""
        chosen = sorted(name for name, session in self.sessions.items() if session.deleted is deleted)
        return chosen[number % len(chosen)], self.sessions[chosen[number % len(chosen)]]

    def fresh(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    @property
    def some_live(self) -> bool:
        return any(not session.deleted for session in self.sessions.values())

    @initialize()
    def open(self) -> None:
        assert self.backend.catalog is not None
        self.catalog: Catalog = self.backend.catalog(self.folder, self.clock)
        self.blobs: BlobStore = (self.backend.blobs or (lambda folder: FileBlobs(folder / "blobs")))(self.folder)
        self.run(self.catalog.open(MARKER))
        self.run(self.blobs.open())
        self.run(self.catalog.register_node(NodeRow("node", "n", "n:1", "n")))
        self.run(self.catalog.create_workflow(WorkflowRow("w")))
        self.store = CheckpointStore(self.catalog, self.blobs)
        options = CollectorOptions(RetentionPolicy(2, 0), grace_seconds=0)
        self.collector = Collector(self.catalog, self.blobs, options, self.clock, "node")
        self.create()

    @rule()
    def create(self) -> None:
        session = self.fresh("s")
        self.run(self.catalog.create_session(new(session)))
        self.sessions[session] = Modelled(epoch=self.run(self.catalog.acquire(name(session), "node", 0)).epoch)

    @precondition(lambda self: self.some_live)
    @rule(number=some, tokens=tokens_of)
    def append(self, number: int, tokens: list[int]) -> None:
        session, model = self.pick(number)
        call = AppendTokens(
            name(session),
            model.epoch,
            tuple(tokens),
            expected_position=len(model.tokens),
            expected_head_hash=model.head_hash(),
            request=request(self.fresh("r")),
        )
        outcome = self.run(self.catalog.append(call))
        assert (outcome.start, outcome.replayed) == (len(model.tokens), False)
        model.tokens += tokens
        assert outcome.head_hash == model.head_hash()
        self.last_append = (call, outcome.head)

    @precondition(lambda self: self.last_append is not None)
    @rule()
    def append_once_more(self) -> None:
        assert self.last_append is not None
        call, head = self.last_append
        again = self.run(self.catalog.append(call))
        assert (again.head, again.replayed) == (head, True)

    @precondition(lambda self: any(model.tokens and not model.deleted for model in self.sessions.values()))
    @rule(number=some, tokens=tokens_of)
    def generate(self, number: int, tokens: list[int]) -> None:
        session, model = self.pick(number)
        if not model.tokens:
            return
        generation = self.fresh("g")
        self.run(self.catalog.begin_generation(BeginGeneration(name(session), model.epoch, generation, PARAMS)))
        for at, token in enumerate(tokens):
            finish = FinishReason.LENGTH if at == len(tokens) - 1 else None
            step = StepCommit(name(session), model.epoch, len(model.tokens), (token,), generation, (-0.5,), finish)
            (outcome,) = self.run(self.catalog.commit_step([step]))
            assert outcome.status is StepStatus.COMMITTED
            model.tokens.append(token)

    @precondition(lambda self: self.some_live)
    @rule(number=some, at=some, count=st.integers(1, 3))
    def fork(self, number: int, at: int, count: int) -> None:
        session, model = self.pick(number)
        position = at % (len(model.tokens) + 1)
        children = [self.fresh("f") for _ in range(count)]
        outcome = self.run(
            self.catalog.fork(ForkSessions(name(session), position, tuple(new(child) for child in children)))
        )
        assert outcome.position == position
        for child in children:
            epoch = self.run(self.catalog.acquire(name(child), "node", 0)).epoch
            self.sessions[child] = Modelled(model.tokens[:position], epoch)

    @precondition(lambda self: self.some_live)
    @rule(number=some, at=some)
    def rewind(self, number: int, at: int) -> None:
        session, model = self.pick(number)
        position = at % (len(model.tokens) + 1)
        self.run(self.catalog.rewind(name(session), model.epoch, position))
        del model.tokens[position:]
        model.checkpoints = {
            checkpoint: prefix
            for checkpoint, prefix in model.checkpoints.items()
            if prefix == model.tokens[: len(prefix)]
        }

    @precondition(lambda self: self.some_live)
    @rule(number=some)
    def take_over(self, number: int) -> None:
        session, model = self.pick(number)
        old, model.epoch = model.epoch, self.run(self.catalog.acquire(name(session), "node", model.epoch)).epoch
        with pytest.raises(StaleEpochError):
            self.run(self.catalog.append(AppendTokens(name(session), old, (1,))))

    @precondition(lambda self: self.some_live)
    @rule(number=some, automatic=st.booleans())
    def checkpoint(self, number: int, automatic: bool) -> None:
        session, model = self.pick(number)
        checkpoint, head = self.fresh("c"), len(model.tokens)
        grid, chain_hash = grid_hashes(root_hash(MARKER), model.tokens)[-1]
        self.run(
            self.store.save(
                session=name(session),
                epoch=model.epoch,
                checkpoint=checkpoint,
                position=head,
                grid_position=grid,
                chain_hash=chain_hash,
                numerics_ids=("n",),
                model_digest=MARKER.model_digest,
                tokenizer_digest=MARKER.tokenizer_digest,
                layout="tiny",
                parts=[(SPEC, state(model.tokens[:grid]))],
                automatic=automatic,
            )
        )
        if not automatic:
            model.checkpoints[checkpoint] = model.tokens[:grid]

    @precondition(lambda self: any(model.checkpoints and not model.deleted for model in self.sessions.values()))
    @rule(number=some, pins=st.booleans())
    def forget_a_checkpoint(self, number: int, pins: bool) -> None:
        """Perhaps while a restorer still reads it."""
        session, model = self.pick(number)
        if not model.checkpoints:
            return
        checkpoint, prefix = model.checkpoints.popitem()
        row, _ = self.run(self.catalog.get_checkpoint(name(session), checkpoint))
        if pins:
            pin = self.fresh("p")
            self.run(self.catalog.pin(Pin(pin, "node", row.manifest_key, 0)))
            self.pinned[pin] = prefix
        self.run(self.catalog.delete_checkpoint(name(session), checkpoint))

    @precondition(lambda self: self.pinned)
    @rule()
    def end_a_restore(self) -> None:
        pin, prefix = self.pinned.popitem()
        assert self.states_at(prefix) == [state(prefix)], "what was pinned is still there, whole"
        self.run(self.catalog.unpin(pin))

    @precondition(lambda self: self.some_live)
    @rule(number=some)
    def delete(self, number: int) -> None:
        session, model = self.pick(number)
        self.run(self.catalog.delete_session(name(session), self.clock.now_us + 10**12))
        model.deleted, model.epoch = True, model.epoch + 1
        with pytest.raises(NotFoundError):
            self.run(self.catalog.read_log(name(session), 0, 1))

    @precondition(lambda self: any(model.deleted for model in self.sessions.values()))
    @rule(number=some)
    def undelete(self, number: int) -> None:
        session, model = self.pick(number, deleted=True)
        assert self.run(self.catalog.undelete_session(name(session))).state is SessionState.PAUSED
        model.deleted = False
        model.epoch = self.run(self.catalog.acquire(name(session), "node", model.epoch)).epoch

    @rule()
    def collect(self) -> None:
        async def whole() -> None:
            reports = [report async for report in self.collector.collect()]
            assert reports[-1].done and not reports[-1].stopped

        before = {session: self.restorable(session) for session, model in self.sessions.items() if not model.deleted}
        self.run(whole())
        after = {session: self.restorable(session) for session in before}
        assert after == before, "a collection changed where a session would be restored from"

    # --- what must hold ----------------------------------------------------------------------------------------
    def restorable(self, session: str) -> int:
        """The newest grid position that a session could be restored from."""
        model = self.sessions[session]
        points = [point for point in grid_hashes(root_hash(MARKER), model.tokens) if point[0] > 0]
        rows = self.run(self.catalog.find_manifests(points)) if points else []
        nearest = self.run(self.catalog.nearest_checkpoint(name(session), len(model.tokens)))
        # A manifest that only a session outside its family names may go with that one.
        return 0 if nearest is None or not rows else nearest.grid_position

    def states_at(self, prefix: list[int]) -> list[bytes]:
        """The states that stored manifests hold for a prefix."""
        point = grid_hashes(root_hash(MARKER), prefix)[-1]

        async def load(manifest: bytes) -> bytes:
            return b"".join([bytes(data) async for _, data in self.store.load(manifest, (SPEC,))])

        rows = self.run(self.catalog.find_manifests([point]))
        return [self.run(load(row.manifest)) for row in rows]

    @invariant()
    def logs_are_as_acknowledged(self) -> None:
        for session, model in self.sessions.items():
            row = self.run(self.catalog.get_session(name(session)))
            assert row.epoch == model.epoch and (row.state is SessionState.DELETED) is model.deleted
            if not model.deleted:
                read = self.run(self.catalog.read_log(name(session), 0, 100_000))
                assert list(read.token_ids) == model.tokens
                assert (row.head, row.head_hash) == (len(model.tokens), model.head_hash())

    @invariant()
    def checkpoints_that_were_asked_for_are_whole(self) -> None:
        for session, model in self.sessions.items():
            if model.deleted:
                continue
            listed = {row.checkpoint for row in self.run(self.catalog.list_checkpoints(name(session)))}
            assert model.checkpoints.keys() <= listed
            for prefix in model.checkpoints.values():
                assert self.states_at(prefix) == [state(prefix)]

    def teardown(self) -> None:
        async def findings() -> list[str]:
            found = [finding async for finding in check(self.catalog, self.blobs)]
            return [str(finding) for finding in found if finding.severity is Severity.ERROR]

        try:
            if hasattr(self, "store"):
                assert self.run(findings()) == []
                self.run(self.catalog.close())
                self.run(self.blobs.close())
        finally:
            self.loop.close()
            shutil.rmtree(self.folder, ignore_errors=True)


@pytest.mark.parametrize("backend", [b for b in backends() if b.label in LABELS], ids=lambda b: b.label)
def test_any_sequence_of_calls_matches_the_model(backend: Backend) -> None:
    if backend.missing:
        pytest.skip(backend.missing)
    machine = type("Machine", (StoreMachine,), {"backend": backend})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=EXAMPLES[backend.label],
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
