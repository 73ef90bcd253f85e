"""The scripted workload: real calls on a real catalog and blob store, each acknowledged before the next begins."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from functools import partial

from forkpoint.ids import SessionName
from forkpoint.parts import PartSpec
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.records import FinishReason, NodeRow, SessionState, WorkflowRow
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.support.store import MARKER, PARAMS, name, new, request

Action = Callable[[], Awaitable[object]]


class Workload:
    """Actions of a small fleet: the same for the same seed."""

    def __init__(self, catalog: SqliteCatalog, checkpoints: CheckpointStore, rounds: int, seed: int = 7) -> None:
        self._catalog = catalog
        self._checkpoints = checkpoints
        self._rounds = rounds
        self._rng = random.Random(seed)

    def actions(self) -> Iterator[Action]:
        """Every action is one acknowledged change."""
        catalog = self._catalog
        yield lambda: catalog.register_node(NodeRow("i1", "node-a", "127.0.0.1:1", "n"))
        yield lambda: catalog.register_node(NodeRow("i2", "node-b", "127.0.0.1:2", "n"))
        yield lambda: catalog.create_workflow(WorkflowRow("w"), request("w"))
        yield lambda: catalog.create_session(new("s0"), request("s0"))
        yield lambda: catalog.acquire(name("s0"), "i1", 0)
        for turn in range(self._rounds):
            yield from self._round(turn)
        yield lambda: catalog.delete_session(name("s0"), 1, request("delete"))
        yield lambda: catalog.undelete_session(name("s0"))

    def _round(self, turn: int) -> Iterator[Action]:
        """A turn of one session: prompt, answer, checkpoint, fork, rewind, move, release."""
        catalog, session, child = self._catalog, name(f"s{turn}"), name(f"s{turn + 1}")
        prompt = tuple(self._rng.randrange(50_000) for _ in range(self._rng.choice((5, 16, 33))))
        yield lambda: catalog.append(AppendTokens(session, 1, prompt, request=request(f"a{turn}")))
        begin = BeginGeneration(session, 1, f"g{turn}", PARAMS, (1, 2), request=request(f"g{turn}"))
        yield lambda: catalog.begin_generation(begin)
        for step in range(3):
            yield partial(self._step, session, f"g{turn}", step, last=step == 2)
        yield lambda: self._checkpoint(f"c{turn}", session)
        children = (new(child.session), new(f"idle{turn}"))
        yield lambda: catalog.fork(ForkSessions(session, None, children, request(f"f{turn}")))
        yield lambda: catalog.acquire(child, "i1", 0)
        yield lambda: self._together(session, child, turn)
        if turn % 2:
            yield lambda: catalog.rewind(session, 1, 3, request(f"r{turn}"))
        moves = turn % 3 == 0
        if moves:
            yield lambda: catalog.begin_migration(session, 1, f"m{turn}", "i2")
            yield lambda: self._cut_over(session, f"m{turn}")
        yield lambda: catalog.release(session, 1 + moves, SessionState.PAUSED)
        if turn % 3 == 2:
            yield lambda: catalog.delete_session(name(f"idle{turn}"), 1)

    async def _step(self, session: SessionName, generation: str, step: int, last: bool) -> None:
        row = await self._catalog.get_session(session)
        finish = FinishReason.LENGTH if last else None
        commit = StepCommit(row.name, row.epoch, row.head, (100 + step,), generation, (-0.5,), finish)
        (outcome,) = await self._catalog.commit_step([commit])
        assert outcome.status.value == "COMMITTED"

    async def _cut_over(self, session: SessionName, migration: str) -> None:
        row = await self._catalog.get_session(session)
        moved = await self._catalog.cut_over(row.name, row.epoch, migration, "i2", row.head, row.head_hash)
        assert (moved.epoch, moved.owner) == (2, "i2")

    async def _together(self, session: SessionName, child: SessionName, turn: int) -> None:
        """Calls that wait at the same moment and so share one transaction; one of them fails alone."""
        go = threading.Event()
        blocker = self._catalog._connection.submit(go.wait)
        calls = (
            self._catalog.append(AppendTokens(session, 1, (turn, turn), request=request(f"t{turn}"))),
            self._catalog.append(AppendTokens(child, 99, (turn,))),
            self._catalog.append(AppendTokens(child, 1, (turn,) * 20)),
        )
        waiting = asyncio.gather(*calls, return_exceptions=True)
        await asyncio.sleep(0)
        go.set()
        results = await waiting
        assert blocker.result()
        assert [type(result).__name__ for result in results] == ["AppendOutcome", "StaleEpochError", "AppendOutcome"]

    async def _checkpoint(self, checkpoint: str, session: SessionName) -> None:
        row = await self._catalog.get_session(session)
        tokens = (await self._catalog.read_log(row.name, 0, 10_000)).token_ids
        position, chain_hash = grid_hashes(root_hash(MARKER), tokens)[-1]
        specs = [PartSpec("kda.000.state.0", "uint8", (900,)), PartSpec("mla.page.000000", "uint8", (600,))]
        parts = [(spec, random.Random(f"{spec.name}{position}").randbytes(spec.nbytes)) for spec in specs]
        await self._checkpoints.save(
            session=row.name,
            epoch=row.epoch,
            checkpoint=checkpoint,
            position=row.head,
            grid_position=position,
            chain_hash=chain_hash,
            numerics_ids=("n",),
            model_digest=MARKER.model_digest,
            tokenizer_digest=MARKER.tokenizer_digest,
            layout="tiny",
            parts=parts,
            request=request(checkpoint),
        )
