"""The second half of the script: sessions with many checkpoints, and a collector that takes what retention drops."""

from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any, Final, cast

from forkpoint.ids import SessionName
from forkpoint.parts import PartSpec
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.calls import AppendTokens, ForkSessions
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.gc import Collector, CollectorOptions
from forkpoint.statestore.retention import RetentionPolicy
from tests.crash.script import Action
from tests.support.store import MARKER, ManualClock, name, new, request

OPTIONS: Final = CollectorOptions(RetentionPolicy(2, 0), grace_seconds=0)
COLLECTORS_WRITES: Final = frozenset(
    {"drop_checkpoints", "remove_manifest", "unpin", "condemn", "absolve", "forget_absolutions", "elect_collector"}
    | {"renew_collector", "resign_collector"}
)


class Collecting:
    """Every write of the collector is an acknowledged change of its own: `acknowledge` notes it."""

    def __init__(
        self,
        catalog: Catalog,
        checkpoints: CheckpointStore,
        blobs: BlobStore,
        rounds: int,
        acknowledge: Callable[[], None],
    ) -> None:
        self.catalog = catalog
        self._checkpoints = checkpoints
        self._blobs = blobs
        self._rounds = rounds
        self._acknowledge = acknowledge

    def actions(self) -> Iterator[Action]:
        """Needs the workflow and the node of the first half."""
        for turn in range(self._rounds):
            yield from self._round(turn)

    def _round(self, turn: int) -> Iterator[Action]:
        catalog, session, child = self.catalog, name(f"k{turn}"), name(f"l{turn}")
        yield lambda: catalog.create_session(new(session.session), request(f"k{turn}"))
        yield lambda: catalog.acquire(session, "i1", 0)
        for step in range(4):
            tokens = tuple(1000 * turn + 20 * step + n for n in range(20))
            yield partial(catalog.append, AppendTokens(session, 1, tokens, request=request(f"k{turn}-{step}")))
            yield partial(self._checkpoint, session, f"c{step}")
        yield lambda: catalog.fork(ForkSessions(session, 40, (new(child.session),), request(f"l{turn}")))
        yield self._collect
        if turn % 2:
            yield lambda: catalog.rewind(session, 1, 35, request(f"m{turn}"))
            yield lambda: catalog.delete_checkpoint(session, "c3", request(f"n{turn}"))
            yield lambda: catalog.append(AppendTokens(session, 1, (turn,) * 40))
        else:
            yield lambda: catalog.delete_session(session, 1, request(f"o{turn}"))
        yield self._collect
        if turn % 2:
            # What was just collected is stored again under the same digests.
            yield partial(self._checkpoint, session, "again")

    async def _collect(self) -> None:
        recorded = cast(Catalog, _Acknowledged(self.catalog, self._acknowledge))
        collector = Collector(recorded, self._blobs, OPTIONS, ManualClock(), "i1")
        reports = [report async for report in collector.collect()]
        assert reports[-1].done and not reports[-1].stopped

    async def _checkpoint(self, session: SessionName, checkpoint: str) -> None:
        row = await self.catalog.get_session(session)
        tokens = (await self.catalog.read_log(session, 0, 10_000)).token_ids
        position, chain_hash = grid_hashes(root_hash(MARKER), tokens)[-1]
        specs = [PartSpec("kda.000.state.0", "uint8", (700,)), PartSpec("mla.page.000000", "uint8", (500,))]
        await self._checkpoints.save(
            session=session,
            epoch=row.epoch,
            checkpoint=checkpoint,
            position=row.head,
            grid_position=position,
            chain_hash=chain_hash,
            numerics_ids=("n",),
            model_digest=MARKER.model_digest,
            tokenizer_digest=MARKER.tokenizer_digest,
            layout="tiny",
            parts=[(spec, Random(f"{spec.name}{chain_hash.hex()}").randbytes(spec.nbytes)) for spec in specs],
            automatic=True,
        )


class _Acknowledged:
    """A catalog that tells of every write that it has answered."""

    def __init__(self, catalog: Catalog, acknowledge: Callable[[], None]) -> None:
        self._catalog = catalog
        self._acknowledge = acknowledge

    def __getattr__(self, method: str) -> Any:
        target = getattr(self._catalog, method)
        if method not in COLLECTORS_WRITES:
            return target

        async def call(*args: Any, **keywords: Any) -> Any:
            answer = await target(*args, **keywords)
            self._acknowledge()
            return answer

        return call
