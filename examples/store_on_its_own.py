"""The state store without the service: an engine of your own, its log, its checkpoints, a crash and a fork.

The "engine" here counts which token follows which and goes on with the most frequent one. What matters: its state is a
function of its tokens, and it says what parts that state has. It needs no server:
`python examples/store_on_its_own.py [FOLDER]`.
"""

import asyncio
import struct
import sys
import tempfile
from array import array
from pathlib import Path

from blake3 import blake3

from forkpoint.errors import StaleEpochError
from forkpoint.ids import SessionName
from forkpoint.parts import PartSpec
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit, StepStatus
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.check import check
from forkpoint.statestore.checkpoint import CheckpointStore, SavedCheckpoint
from forkpoint.statestore.open import open_blobs, open_catalog
from forkpoint.statestore.records import (
    SCHEMA_VERSION,
    CheckpointPolicy,
    FinishReason,
    GenerationParams,
    NewSession,
    SamplingParams,
    SessionState,
    StoreMarker,
    WorkflowRow,
)

VOCABULARY = 256
ENGINE = b"counts of pairs, version 1"
MARKER = StoreMarker(SCHEMA_VERSION, "default", blake3(ENGINE).digest(), blake3(b"bytes").digest())
"""Whatever decides what a state means is in the digests: a store opens for nobody else."""
PARTS = (PartSpec("pairs", "int32", (VOCABULARY, VOCABULARY)), PartSpec("last", "int32", (1,)))
NUMERICS = "integers-1"
PARAMS = GenerationParams(SamplingParams(0.0, 0, 1.0, 0.0, 0), max_tokens=64)


class PairCounts:
    """The engine."""

    def __init__(self) -> None:
        self.pairs = array("i", bytes(4 * VOCABULARY**2))
        self.last = 0

    def consume(self, token: int) -> None:
        """Go on by one token."""
        self.pairs[self.last * VOCABULARY + token] += 1
        self.last = token

    def next_token(self) -> int:
        """What followed the last token most often, the smallest such token on a tie."""
        row = self.pairs[self.last * VOCABULARY : (self.last + 1) * VOCABULARY]
        return row.index(max(row))

    def parts(self) -> list[tuple[PartSpec, bytes]]:
        """The state, part by part."""
        return list(zip(PARTS, (self.pairs.tobytes(), struct.pack("<i", self.last)), strict=True))

    def load(self, spec: PartSpec, data: bytes) -> None:
        """Take a part of a checkpoint."""
        if spec.name == "pairs":
            self.pairs = array("i", data)
        else:
            (self.last,) = struct.unpack("<i", data)


class Owner:
    """One process that owns a session: it runs the engine and writes what it does."""

    def __init__(self, catalog: Catalog, blobs: BlobStore, session: SessionName) -> None:
        self.catalog, self.session = catalog, session
        self.checkpoints = CheckpointStore(catalog, blobs)
        self.engine = PairCounts()
        self.epoch = self.head = 0

    async def take(self, me: str) -> int:
        """Own the session under the next epoch, and bring the engine to its head; returns the tokens replayed."""
        row = await self.catalog.get_session(self.session)
        row = await self.catalog.acquire(self.session, me, row.epoch)
        self.epoch, self.head, start = row.epoch, row.head, 0
        found = await self.catalog.nearest_checkpoint(self.session, row.head)
        if found is not None:
            _, manifest = await self.catalog.get_checkpoint(found.session, found.checkpoint)
            async for spec, data in self.checkpoints.load(manifest, PARTS):
                self.engine.load(spec, bytes(data))
            start = found.grid_position
        for token in (await self.catalog.read_log(self.session, start, row.head - start)).token_ids:
            self.engine.consume(token)
        return row.head - start

    async def leave(self) -> None:
        """Give the session up in good order."""
        await self.catalog.release(self.session, self.epoch, SessionState.PAUSED)

    async def read(self, text: bytes) -> None:
        """Append input: durable when this returns."""
        outcome = await self.catalog.append(AppendTokens(self.session, self.epoch, tuple(text)))
        for token in text:
            self.engine.consume(token)
        self.head = outcome.head

    async def write(self, generation: str, count: int) -> bytes:
        """Generate: no token is shown before it is in the log."""
        await self.catalog.begin_generation(BeginGeneration(self.session, self.epoch, generation, PARAMS))
        shown = bytearray()
        for number in range(count):
            token = self.engine.next_token()
            finish = FinishReason.LENGTH if number == count - 1 else None
            step = StepCommit(self.session, self.epoch, self.head, (token,), generation, finish=finish)
            (outcome,) = await self.catalog.commit_step([step])
            if outcome.status is not StepStatus.COMMITTED:
                raise StaleEpochError(str(self.session), self.epoch, outcome.epoch)
            self.engine.consume(token)
            self.head = outcome.head
            shown.append(token)
        return bytes(shown)

    async def save(self, checkpoint: str) -> SavedCheckpoint:
        """A checkpoint at the head. Checkpoints lie on the grid of every 16th token: an engine that wants one in
        between keeps its state as of the last grid point."""
        log = await self.catalog.read_log(self.session, 0, self.head)
        position, chain_hash = grid_hashes(root_hash(MARKER), log.token_ids)[-1]
        assert position == self.head, "off the grid"
        return await self.checkpoints.save(
            session=self.session,
            epoch=self.epoch,
            checkpoint=checkpoint,
            position=self.head,
            grid_position=position,
            chain_hash=chain_hash,
            numerics_ids=[NUMERICS],
            model_digest=MARKER.model_digest,
            tokenizer_digest=MARKER.tokenizer_digest,
            layout="pairs-1",
            parts=self.engine.parts(),
        )


async def main(folder: Path) -> None:
    """The whole example."""
    catalog, blobs = open_catalog(f"sqlite://{folder}/catalog.db"), open_blobs(f"file://{folder}/blobs")
    await catalog.open(MARKER)
    await blobs.open()
    await catalog.create_workflow(WorkflowRow("stories"))
    first = SessionName("stories", "first")
    await catalog.create_session(NewSession(first, seed=0, policy=CheckpointPolicy(every_tokens=0)))

    owner = Owner(catalog, blobs, first)
    await owner.take("process-1")
    await owner.read(b"the cat and the dog and the hen ")
    saved = await owner.save("at-32")
    await owner.write("g1", 9)
    print(f"saved {saved.bytes_stored} bytes of {sum(spec.nbytes for spec in PARTS)}")

    # The process stops here. Another one takes the session: newest checkpoint, then the log's tail.
    heir = Owner(catalog, blobs, first)
    replayed = await heir.take("process-2")
    print(f"replayed {replayed} tokens; same state: {heir.engine.parts() == owner.engine.parts()}")

    # The first one was only asleep. What it writes now is refused, whole.
    try:
        await owner.read(b"!")
    except StaleEpochError as error:
        print(f"refused: epoch {error.epoch}, the session is at {error.current_epoch}")

    # A fork costs a row, and its first checkpoint shares what it has in common with others.
    second = SessionName("stories", "second")
    await catalog.fork(ForkSessions(first, 32, (NewSession(second, 0, CheckpointPolicy(0)),)))
    branch = Owner(catalog, blobs, second)
    await branch.take("process-2")
    again = await branch.save("at-32")
    print(f"the fork shares {again.bytes_shared} bytes and stored {again.bytes_stored}")
    heard, told = await branch.write("g1", 9), (await catalog.read_log(first, 32, 9)).token_ids
    print(f"both tell the same: {heard == bytes(told)}")

    for last in (heir, branch):
        await last.leave()
    print(f"{len([finding async for finding in check(catalog, blobs)])} findings")
    await catalog.close()
    await blobs.close()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(main(Path(sys.argv[1]).resolve()))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            asyncio.run(main(Path(temporary)))
