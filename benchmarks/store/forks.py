"""A tree of 100 forks of the tiny model, each with a checkpoint: bytes that they would take alone, and bytes stored."""

import tempfile
from pathlib import Path
from typing import Final

from benchmarks.record import Measurement
from forkpoint.ids import SessionName
from forkpoint.model.tiny.data import make_document
from forkpoint.server.engine.batch import Work
from forkpoint.server.engine.open import open_engine
from forkpoint.server.engine.runner import TorchEngine
from forkpoint.statestore.calls import AppendTokens, ForkSessions
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.checkpoint import CheckpointStore, SavedCheckpoint
from forkpoint.statestore.open import open_blobs, open_catalog
from forkpoint.statestore.records import (
    SCHEMA_VERSION,
    CheckpointPolicy,
    NewSession,
    StoreMarker,
    WorkflowRow,
)

TINY: Final = Path(__file__).parents[2] / "model" / "tiny"
MARKER: Final = StoreMarker(SCHEMA_VERSION, "default", bytes(32), bytes(32))
MEMORY: Final = Path("/dev/shm")
PROMPT: Final = 2048
OWN: Final = 64
"""Tokens that each branch adds."""


class Tree:
    """A parent and its branches, in one engine and one store."""

    def __init__(self, engine: TorchEngine, store: CheckpointStore) -> None:
        self._engine = engine
        self._store = store
        self.saved: list[SavedCheckpoint] = []

    async def save(self, name: SessionName, sequence: int, tokens: tuple[int, ...]) -> None:
        """Checkpoint a session whose tokens these are."""
        captured = self._engine.capture(sequence)
        position, chain_hash = grid_hashes(root_hash(MARKER), tokens)[-1]
        assert position == captured.grid_position
        self.saved.append(
            await self._store.save(
                session=name,
                epoch=1,
                checkpoint="c",
                position=len(tokens),
                grid_position=position,
                chain_hash=chain_hash,
                numerics_ids=["benchmark"],
                model_digest=MARKER.model_digest,
                tokenizer_digest=MARKER.tokenizer_digest,
                layout="benchmark",
                parts=captured.parts,
            )
        )

    def consume(self, sequence: int, tokens: tuple[int, ...]) -> None:
        """Let a sequence go on by tokens."""
        start = self._engine.consumed(sequence)
        for offset in range(0, len(tokens), 512):
            self._engine.step([Work(sequence, start + offset, tokens[offset : offset + 512])])


async def measure(folder: Path, quick: bool) -> list[Measurement]:
    """One parent of 2,048 tokens, 100 branches of 64 more."""
    prompt, count = (1024, 4) if quick else (PROMPT, 100)
    engine, _ = open_engine(TINY, slots=4, pages=2 * (prompt + OWN) // 64 + 8)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else folder) as memory:
        catalog, blobs = open_catalog("memory://"), open_blobs(f"file://{memory}")
        await catalog.open(MARKER)
        await blobs.open()
        tree, parent = Tree(engine, CheckpointStore(catalog, blobs)), SessionName("w", "parent")
        await catalog.create_workflow(WorkflowRow("w"))
        await catalog.create_session(NewSession(parent, 0, CheckpointPolicy(0)))
        await catalog.acquire(parent, "node-1", 0)
        tokens = tuple(make_document(4, prompt, 8)[0])
        await catalog.append(AppendTokens(parent, 1, tokens))
        root = engine.create()
        tree.consume(root, tokens)
        await tree.save(parent, root, tokens)
        names = [SessionName("w", f"branch-{number}") for number in range(count)]
        await catalog.fork(
            ForkSessions(parent, None, tuple(NewSession(name, 0, CheckpointPolicy(0)) for name in names))
        )
        for number, name in enumerate(names):
            own = tuple(make_document(100 + number, 1024, 8)[0])[:OWN]
            await catalog.acquire(name, "node-1", 0)
            await catalog.append(AppendTokens(name, 1, own))
            sequence = engine.fork(root)
            tree.consume(sequence, own)
            await tree.save(name, sequence, tokens + own)
            engine.free(sequence)
        digests = [digest async for digest in blobs.digests()]
        stored = sum(size or 0 for size in await blobs.sizes(digests))
        await blobs.close()
        await catalog.close()
    raw = sum(part.spec.nbytes for saved in tree.saved for part in saved.parts)
    apart = sum(_frames_apart(saved, tree.saved) for saved in tree.saved)
    case = f"a parent of {prompt} tokens and {count} branches of {OWN} more, tiny model"
    return [
        Measurement(case, "stored", "bytes", stored, peer="each checkpoint by itself", peer_value=apart),
        Measurement(case, "raw state", "bytes", raw),
        Measurement(case, "blobs", "count", len(digests)),
    ]


def _frames_apart(saved: SavedCheckpoint, everyone: list[SavedCheckpoint]) -> int:
    """What a checkpoint's frames would take without sharing: a shared one is as long as where it was written."""
    written = {part.digest: part.frame_bytes for other in everyone for part in other.parts if not part.shared}
    return sum(written[part.digest] for part in saved.parts)
