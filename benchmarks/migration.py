"""What a client notices of a move, against the length of its session: `python -m benchmarks.migration`.

Two nodes of one model over one store. A client streams; its session is moved to the other node again and again. A
move's downtime is the longest gap between two tokens, from the call to some tokens behind its last event, less the
median gap of the whole stream. Beside it, in the same run, what else one could do: `stop-and-copy` (pause, which
checkpoints, and resume on the other node), and `re-prefill` (a new session there, to which all tokens are appended).
Theirs is the gap between the last token before and the first one after, less the same median.
"""

import argparse
import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.cluster import NodeProcess, TimedStream, grown, nodes
from benchmarks.percentile import percentile
from benchmarks.record import RESULTS, Measurement, save, show
from forkpoint.client.client import Client
from forkpoint.client.generation import Generation
from forkpoint.client.session import Session
from forkpoint.ids import new_id
from forkpoint.limits import PAGE_TOKENS
from forkpoint.model.config import ModelConfig

TINY: Final = Path(__file__).parents[1] / "model" / "tiny"
LENGTHS: Final = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
TOKENS: Final = 100_000
"""A stream ends when it is told to."""
WARM_TOKENS: Final = 24
EVERY: Final = 1024
"""Tokens between checkpoints."""


@dataclass
class Downtimes:
    """Of one length, in seconds, less the median gap."""

    moves: list[float] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    """As the source tells them: how long no token could be committed."""
    copies: list[float] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)
    median_gap: float = 0.0


@dataclass
class Pair:
    """Two nodes and a client of both; sessions are on either of them."""

    client: Client
    nodes: Sequence[NodeProcess]

    async def node_of(self, session: Session) -> NodeProcess:
        """Where it is now."""
        owner = (await session.get()).node.removeprefix("nodes/")
        return next(node for node in self.nodes if node.name == owner)

    async def other(self, session: Session) -> NodeProcess:
        """Where it is not."""
        here = await self.node_of(session)
        return next(node for node in self.nodes if node is not here)

    def generate(self, session: Session, request_id: str, position: int | None) -> Generation:
        """A stream that is long enough."""
        return session.generate(
            text="\n",
            max_tokens=TOKENS,
            request_id=request_id,
            resume_position=position,
        )

    async def move(self, session: Session, stream: TimedStream) -> tuple[float, float]:
        """(longest gap, pause that the source tells of one move), in seconds."""
        to = await self.other(session)
        first = max(0, len(stream.times) - 1)
        last = await session.migrate(to.name).result()
        await stream.reach(len(stream.times) + WARM_TOKENS)
        return max(stream.gaps(first)), last.pause.ToMicroseconds() / 1e6

    async def stop_and_copy(self, session: Session) -> float:
        """The gap of a pause here and a resume there, in seconds."""
        stream = TimedStream(partial(self.generate, session))
        reader = asyncio.get_running_loop().create_task(stream.read())  # owner: this function
        await stream.reach(WARM_TOKENS)
        to = await self.other(session)
        await session.pause()
        async with Client(to.address) as there:
            await there.sessions.open(session.name).resume()
        await stream.reach(len(stream.times) + WARM_TOKENS)
        reader.cancel()
        await session.cancel_generation()
        return max(stream.gaps())

    async def re_prefill(self, session: Session, name: str) -> float:
        """The gap of a new session there, to which everything is appended, in seconds."""
        stream = TimedStream(partial(self.generate, session))
        reader = asyncio.get_running_loop().create_task(stream.read())  # owner: this function
        await stream.reach(WARM_TOKENS)
        to = await self.other(session)
        reader.cancel()
        began = stream.times[-1]
        await session.cancel_generation()
        known = (await session.tokens().result()).token_ids
        async with Client(to.address) as there:
            fresh = await there.sessions.create("w", name, seed=1, every_tokens=0)
            await fresh.append(tokens=known)
            again = self.generate(fresh, new_id("r"), None)
            await anext(again)
            gap = time.perf_counter() - began
            await again.detach()
            await fresh.cancel_generation()
            await fresh.delete()
        return gap


async def downtimes(pair: Pair, length: int, moves: int, others: int) -> Downtimes:
    """All that is measured at one length."""
    found = Downtimes()
    parent = await grown(pair.client, f"parent-{length}", length, EVERY)
    (session,) = await parent.fork(session_ids=[f"moved-{length}"])
    stream = TimedStream(partial(pair.generate, session))
    reader = asyncio.get_running_loop().create_task(stream.read())  # owner: this function
    await stream.reach(WARM_TOKENS)
    for _ in range(moves):
        gap, pause = await pair.move(session, stream)
        found.moves.append(gap)
        found.pauses.append(pause)
    reader.cancel()
    await session.cancel_generation()
    found.median_gap = stream.median_gap()
    for number in range(others):
        found.copies.append(await pair.stop_and_copy(session))
        found.prefills.append(await pair.re_prefill(session, f"fresh-{length}-{number}"))
    await session.delete()
    await parent.delete()
    for samples in (found.moves, found.copies, found.prefills):
        samples[:] = [max(0.0, sample - found.median_gap) for sample in samples]
    return found


def rows_of(model: str, length: int, found: Downtimes) -> list[Measurement]:
    """The figures of one length."""
    case = f"{model}, {length:,} tokens"
    rows = [Measurement(case, "median gap between tokens", "ms", 1e3 * found.median_gap)]
    for share, name in ((0.5, "p50"), (0.99, "p99")):
        value = 1e3 * percentile(found.moves, share)
        for peer, samples in (("stop-and-copy", found.copies), ("re-prefill", found.prefills)):
            peer_value = 1e3 * percentile(samples, share)
            rows.append(Measurement(case, f"downtime of a move, {name}", "ms", value, peer, peer_value))
        paused = 1e3 * percentile(found.pauses, share)
        rows.append(Measurement(case, f"no commit at the source, {name}", "ms", paused))
    return rows


async def measure(folder: Path, model: Path, given: argparse.Namespace) -> None:
    """All lengths, one after the other; what is there is saved after each."""
    room = 2 * (max(given.lengths) + TOKENS // 16)
    settings = {"model": model, "device": given.device, "slots": 8, "pages": 2 * room // PAGE_TOKENS}
    rows: list[Measurement] = []
    async with (
        nodes(folder, 2, {**settings, "gc_interval_seconds": 0}, given.catalog) as pair,
        Client([node.address for node in pair], patience_s=300) as client,
    ):
        await client.workflows.create("w")
        for length in given.lengths:
            found = await downtimes(Pair(client, pair), length, given.moves, given.others)
            new = rows_of(model.name, length, found)
            rows += new
            show(new)
            save(given.name, rows, given.on, given.at, given.into)


def roomy(model: Path, folder: Path, tokens: int) -> Path:
    """The model, or a copy of it, whose context is at least so long: neither kind of layer minds."""
    if ModelConfig.from_folder(model).context_limit >= tokens:
        return model
    copy = folder / model.name
    shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    config = json.loads((model / "config.json").read_text())
    text = config.get("text_config", config)
    text["model_max_length" if "model_max_length" in text else "max_position_embeddings"] = tokens
    (copy / "config.json").write_text(json.dumps(config))
    return copy


def main() -> None:
    """Measure and write benchmarks/results/migration.jsonl."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.migration")
    parser.add_argument("--model", type=Path, default=TINY, help="folder (default: the tiny model)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--moves", type=int, default=20, help="of each length")
    parser.add_argument("--others", type=int, default=3, help="stop-and-copies and re-prefills of each length")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--catalog", choices=("redis", "sqlite"), default="redis")
    parser.add_argument("--name", default="migration", help="of the file in benchmarks/results")
    parser.add_argument("--on", help="the machine in words (default: this CPU)")
    parser.add_argument("--at", help="the commit (default: git's)")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder for the results")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="forkpoint-migration-") as temporary:
        folder = Path(temporary)
        model = roomy(given.model, folder, 2 * max(given.lengths))
        asyncio.run(measure(folder, model, given))


if __name__ == "__main__":
    main()
