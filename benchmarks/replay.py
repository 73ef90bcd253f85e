"""How fast a node replays a log against how fast it prefills: `python -m benchmarks.replay`.

One node appends the tokens of a session without checkpoints and samples one more; it dies, and another one, which has
only the log, samples the next. Both times are to that token, so the second holds the taking of the session as well.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Final

from benchmarks.record import Measurement, save, write
from forkpoint.ids import SessionName
from forkpoint.model.tiny.data import make_document
from forkpoint.server.app import TokenizerCodec
from forkpoint.server.engine.open import open_engine
from forkpoint.server.session.api import AppendCall, CreateSession, GenerateCall, Input
from forkpoint.server.session.node import Node
from forkpoint.server.session.options import NodeOptions
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import SCHEMA_VERSION, CheckpointPolicy, RequestKey, StoreMarker, WorkflowRow

TINY: Final = Path(__file__).parents[1] / "model" / "tiny"
LENGTHS: Final = (1024, 4096, 16384)
NO_CHECKPOINTS: Final = CheckpointPolicy(every_tokens=0)
SHARE_MIN: Final = 0.5
"""Of prefill's tokens a second."""


class Bench:
    """Nodes over one store in memory; each loads the model anew."""

    def __init__(self, model: Path, device: str, tokens: int) -> None:
        self._model, self._device, self._pages = model, device, 2 * (tokens // 64 + 2)
        self._catalog, self._blobs = MemoryCatalog(), MemoryBlobs()
        self._number = 0

    async def node(self) -> Node:
        """Start one."""
        self._number += 1
        engine, tokenizer = open_engine(self._model, self._device, slots=2, pages=self._pages)
        marker = StoreMarker(SCHEMA_VERSION, "default", engine.facts.model_digest, engine.facts.tokenizer_digest)
        await self._catalog.open(marker)
        options = NodeOptions(
            node=f"n{self._number}",
            address=f"host:{self._number}",
            prefill_chunk_tokens=512,
            lease_renew_seconds=0.2,
            lease_ttl_seconds=1.0,
            lease_skew_seconds=0.2,
        )
        store = CheckpointStore(self._catalog, self._blobs)
        node = Node(self._catalog, store, engine, TokenizerCodec(tokenizer), options, marker, blobs=self._blobs)
        await node.start()
        return node


async def token_after(node: Node, name: SessionName, request: str) -> None:
    """Sample one token."""
    call = GenerateCall(name, RequestKey("bench", name.workflow, request, request.encode()), max_tokens=1)
    async for _ in node.generate(call):
        pass


async def one(bench: Bench, length: int, number: int) -> tuple[float, float]:
    """Seconds of (prefill, replay) of so many tokens."""
    first = await bench.node()
    workflow = f"w{length}-{number}"
    await first.create_workflow(WorkflowRow(workflow), None)
    name = SessionName(workflow, "s")
    await first.create_session(CreateSession(name, 1, NO_CHECKPOINTS))
    tokens = tuple(make_document(11 + number, length, 8)[0][:length])
    began = time.perf_counter()
    await first.append(AppendCall(name, Input(token_ids=tokens), request=None))
    await token_after(first, name, "g1")
    prefill = time.perf_counter() - began
    await first.abandon()
    second = await bench.node()
    while len(await second.list_nodes()) > 1:  # noqa: ASYNC110 - nobody tells when the first one's lease is over
        await asyncio.sleep(0.05)
    began = time.perf_counter()
    await token_after(second, name, "g2")
    replay = time.perf_counter() - began
    await second.stop()
    return prefill, replay


async def measure(given: argparse.Namespace) -> list[Measurement]:
    """All lengths."""
    bench = Bench(given.model, given.device, max(given.lengths))
    rows = []
    for length in given.lengths:
        times = [await one(bench, length, number) for number in range(given.rounds)]
        prefill, replay = (length / statistics.median(column) for column in zip(*times, strict=True))
        rows.append(
            Measurement(
                f"{given.model.name}, {length:,} tokens", "replay of a log", "tokens/s", replay,
                "prefill", prefill, target=SHARE_MIN * prefill,
            )
        )  # fmt: skip
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure and write benchmarks/results/replay.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replay")
    parser.add_argument("--model", type=Path, default=TINY, help="folder (default: the tiny model)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=3, help="of each length; medians are published")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--on", help="the machine in words (default: this CPU)")
    parser.add_argument("--at", help="the commit (default: git's)")
    parser.add_argument("--into", type=Path, help="folder for the results (default: benchmarks/results)")
    given = parser.parse_args()
    rows = asyncio.run(measure(given))
    if given.on is None and given.into is None:
        print(write("replay", rows))
    else:
        print(save("replay", rows, given.on, given.at, *([given.into] if given.into else [])))


if __name__ == "__main__":
    main()
