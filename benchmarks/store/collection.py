"""Garbage collection against the size of the store: blobs as files, two in a hundred of them named by no manifest.

The blobs are written without syncing, and a manifest names a hundred. What is measured is a whole collection: judge
checkpoints, mark, list, condemn, look again, delete, absolve.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from blake3 import blake3

from benchmarks.record import Measurement
from forkpoint.clock import SystemClock
from forkpoint.ids import SessionName
from forkpoint.parts import PartSpec
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.gc import Collector, CollectorOptions
from forkpoint.statestore.gcreport import CollectionReport
from forkpoint.statestore.manifest import Manifest, ManifestPart, StateIdentity, seal
from forkpoint.statestore.open import open_blobs, open_catalog
from forkpoint.statestore.records import (
    SCHEMA_VERSION,
    CheckpointPolicy,
    CheckpointRow,
    NewSession,
    StoreMarker,
    WorkflowRow,
)
from forkpoint.statestore.retention import RetentionPolicy

SIZES: Final = (10_000, 100_000, 1_000_000)
NAMED: Final = 100
"""Blobs of one manifest."""
GARBAGE: Final = 0.02
FRAME: Final = 64
A_SESSION: Final = 50
"""Checkpoints of one session, all of which its policy keeps."""
MARKER: Final = StoreMarker(SCHEMA_VERSION, "default", bytes(32), bytes(32))


async def measure(folder: Path, quick: bool) -> list[Measurement]:
    """One store of each size."""
    rows: list[Measurement] = []
    before: tuple[int, float] | None = None
    for size in (2_000,) if quick else SIZES:
        seconds, report = await one_size(folder / str(size), size)
        assert report.blobs_deleted == round(size * GARBAGE) and report.blobs_marked == size - report.blobs_deleted
        linear = None if before is None else before[1] * size / before[0]
        rows.append(
            Measurement(
                f"a store of {size:,} blobs, 2 % garbage",
                "collection",
                "s",
                seconds,
                peer=None if linear is None else "ten times the store before",
                peer_value=linear,
            )
        )
        before = size, seconds
    return rows


async def one_size(folder: Path, size: int) -> tuple[float, CollectionReport]:
    """Build a store, look once, then measure the collection that deletes."""
    digests = [blake3(number.to_bytes(8, "little")).hexdigest() for number in range(size)]
    garbage = set(digests[:: round(1 / GARBAGE)])
    await asyncio.to_thread(write_files, folder / "blobs" / "blobs", digests)
    catalog, blobs = open_catalog(f"sqlite://{folder}/catalog.db"), open_blobs(f"file://{folder}/blobs")
    await catalog.open(MARKER)
    await blobs.open()
    await write_manifests(catalog, [digest for digest in digests if digest not in garbage])
    options = CollectorOptions(RetentionPolicy(A_SESSION, 0), grace_seconds=0)
    collector = Collector(catalog, blobs, options, SystemClock(), "benchmark")
    *_, seen = [report async for report in collector.collect(dry_run=True)]
    assert len(seen.doomed) == len(garbage)
    began = time.perf_counter()
    *_, report = [report async for report in collector.collect()]
    took = time.perf_counter() - began
    await blobs.close()
    await catalog.close()
    return took, report


def write_files(root: Path, digests: list[str]) -> None:
    """Frames of nothing in particular: a collector never looks into one."""
    frame = bytes(FRAME)
    for fan_out in sorted({digest[:2] for digest in digests}):
        (root / fan_out).mkdir(parents=True)

    def write(part: list[str]) -> None:
        for digest in part:
            (root / digest[:2] / digest).write_bytes(frame)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, [digests[offset : offset + 5000] for offset in range(0, len(digests), 5000)]))


async def write_manifests(catalog: Catalog, digests: list[str]) -> None:
    """Checkpoints that name all of `digests`."""
    await catalog.create_workflow(WorkflowRow("w"))
    groups = [digests[offset : offset + NAMED] for offset in range(0, len(digests), NAMED)]
    for number, offset in enumerate(range(0, len(groups), A_SESSION)):
        name = SessionName("w", f"s-{number:05d}")
        await catalog.create_session(NewSession(name, 0, CheckpointPolicy(0)))
        await catalog.acquire(name, "node-1", 0)
        mine = groups[offset : offset + A_SESSION]
        tokens = tuple(number * 16 * A_SESSION + index for index in range(16 * len(mine)))
        await catalog.append(AppendTokens(name, 1, tokens))
        points = grid_hashes(root_hash(MARKER), tokens)[1:]
        await asyncio.gather(*(_put(catalog, name, *point, group) for point, group in zip(points, mine, strict=True)))


async def _put(catalog: Catalog, name: SessionName, position: int, chain_hash: bytes, digests: list[str]) -> None:
    identity = StateIdentity(MARKER.namespace, MARKER.model_digest, MARKER.tokenizer_digest, "benchmark")
    parts = tuple(ManifestPart(PartSpec(f"p{n}", "uint8", (8,)), digest) for n, digest in enumerate(digests))
    manifest = seal(Manifest(identity, ("benchmark",), position, chain_hash, parts))
    row = CheckpointRow(name, f"c-{position}", position, position, chain_hash, "benchmark", True, create_us=0)
    await catalog.put_checkpoint(row, manifest, 1, digests=digests)
