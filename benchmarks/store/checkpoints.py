"""Checkpoints written and read: to files and servers, against the disk itself and against doing it by hand.

The state is of Kimi Linear's geometry (KDA in fp32, latents in bf16), its values normally distributed. Rates are raw
bytes of the state per second of the whole call: digests, encoding, writing and syncing every blob, and the manifest.
Reads are verified, those of files after they were dropped from the page cache.
"""

import asyncio
import io
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote

import numpy as np
import redis
import torch

from benchmarks.record import Measurement
from benchmarks.store.places import ALWAYS, EVERYSEC, PRODUCTS, disk_rates, forget, server
from forkpoint.ids import SessionName
from forkpoint.model.config import ModelConfig
from forkpoint.model.geometries import kimi_linear
from forkpoint.model.layout import StateDtypes, StateLayout
from forkpoint.parts import PartSpec
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.calls import AppendTokens
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

MARKER: Final = StoreMarker(SCHEMA_VERSION, "default", bytes(32), bytes(32))
NAME: Final = SessionName("w", "s")
LAYOUT: Final = StateLayout(ModelConfig.from_dict(kimi_linear()), StateDtypes(activation="bfloat16"))
TOKENS: Final = 8192
QUICK_TOKENS: Final = 64
SHARE_OF_DISK: Final = 0.9
BY_HAND: Final = "torch.save"

Parts = list[tuple[PartSpec, bytes]]


@dataclass(frozen=True, slots=True)
class Rates:
    """Medians of some rounds, in GB/s."""

    write: float
    read: float
    stored: int
    """Bytes of one state as stored."""


async def measure(folder: Path, quick: bool) -> list[Measurement]:
    """Files first, then every server."""
    tokens, rounds = (QUICK_TOKENS, 1) if quick else (TOKENS, 5)
    states = [make_state(seed, tokens) for seed in range(rounds)]
    size = sum(spec.nbytes for spec, _ in states[0])
    case = f"a state of {size / 1e6:.0f} MB"
    disk_write, disk_read = disk_rates(folder, max(64 << 20, size // (4 << 20) * (4 << 20)), max(3, rounds))
    rows = [
        Measurement("the disk, sequential, 4 MiB at a time", "write", "GB/s", disk_write),
        Measurement("the disk, sequential, 4 MiB at a time", "read", "GB/s", disk_read),
    ]
    hand = files_by_hand(folder, states)
    for label, compress in (("compressed", True), ("not compressed", False)):
        ours = await files(folder / label, states, compress)
        name = f"files, {label}, {case}"
        for metric, mine, peer, disk in (
            ("write", ours.write, hand.write, disk_write),
            ("read", ours.read, hand.read, disk_read),
        ):
            target = SHARE_OF_DISK * disk
            rows.append(Measurement(name, metric, "GB/s", mine, f"{BY_HAND}, fsync", peer, disk, target))
        rows.append(Measurement(name, "stored", "bytes", ours.stored, BY_HAND, hand.stored))
        rows += await codec_rates(states, label, compress)
    for product, shown in PRODUCTS.items():
        for label, options in (("always", ALWAYS), ("everysec", EVERYSEC), ("no file", ())):
            with server(product, folder / f"{product}-{label.replace(' ', '-')}", *options) as process:
                if process is None:
                    continue
                hand = server_by_hand(process.port, states)
                process.command("FLUSHALL")
                ours = await blobs_rates(folder, open_blobs(process.url()), states, f"{product}-{label[:2]}")
                name = f"{shown}, {'appendfsync ' + label if options else label}, {case}"
                rows += [
                    Measurement(name, "write", "GB/s", ours.write, f"{BY_HAND} + SET", hand.write),
                    Measurement(name, "read", "GB/s", ours.read, "GET + torch.load", hand.read),
                ]
    return rows


def make_state(seed: int, tokens: int) -> Parts:
    """A session's state after so many tokens; every seed's is all different."""
    rng = np.random.default_rng(seed)
    parts = []
    for spec in LAYOUT.parts(tokens):
        count = spec.nbytes // (4 if spec.dtype == "float32" else 2)
        values = rng.standard_normal(count, dtype=np.float32)
        data = values.tobytes() if spec.dtype == "float32" else values.view(np.uint16)[1::2].tobytes()
        parts.append((spec, data))
    return parts


# --- ours ----------------------------------------------------------------------------------------------------------
async def files(root: Path, states: list[Parts], compress: bool) -> Rates:
    """Blobs as files."""

    def drop() -> None:
        for path in (root / "blobs").rglob("*"):
            if path.is_file():
                forget(path)

    url = f"file://{quote(str(root))}"
    return await blobs_rates(root.parent, open_blobs(url), states, root.name, drop, compress)


async def blobs_rates(
    folder: Path,
    blobs: BlobStore,
    states: list[Parts],
    label: str,
    drop: Callable[[], None] | None = None,
    compress: bool = True,
) -> Rates:
    """Save each state, then load each."""
    catalog = open_catalog(f"sqlite://{folder}/{quote(label)}.db")
    await catalog.open(MARKER)
    await blobs.open()
    store = CheckpointStore(catalog, blobs, compress=compress)
    points = await _session(catalog, len(states))
    size, writes, reads, saved = sum(spec.nbytes for spec, _ in states[0]), [], [], list[SavedCheckpoint]()
    for (position, chain_hash), parts in zip(points, states, strict=True):
        began = time.perf_counter()
        saved.append(await _save(store, position, chain_hash, parts))
        writes.append(size / (time.perf_counter() - began) / 1e9)
    if drop is not None:
        await asyncio.to_thread(drop)
    for checkpoint, parts in zip(saved, states, strict=True):
        began = time.perf_counter()
        async for _ in store.load(checkpoint.manifest, [spec for spec, _ in parts]):
            pass
        reads.append(size / (time.perf_counter() - began) / 1e9)
    await blobs.close()
    await catalog.close()
    return Rates(statistics.median(writes), statistics.median(reads), saved[0].bytes_stored)


async def _session(catalog: Catalog, points: int) -> list[tuple[int, bytes]]:
    """A session with a grid point for each state, owned at epoch 1."""
    tokens = tuple(range(16 * points))
    await catalog.create_workflow(WorkflowRow(NAME.workflow))
    await catalog.create_session(NewSession(NAME, 0, CheckpointPolicy(0)))
    await catalog.acquire(NAME, "node-1", 0)
    await catalog.append(AppendTokens(NAME, 1, tokens))
    return grid_hashes(root_hash(MARKER), tokens)[1:]


def _save(store: CheckpointStore, position: int, chain_hash: bytes, parts: Parts) -> Awaitable[SavedCheckpoint]:
    return store.save(
        session=NAME,
        epoch=1,
        checkpoint=f"c-{position}",
        position=position,
        grid_position=position,
        chain_hash=chain_hash,
        numerics_ids=["benchmark"],
        model_digest=MARKER.model_digest,
        tokenizer_digest=MARKER.tokenizer_digest,
        layout="benchmark",
        parts=parts,
    )


async def codec_rates(states: list[Parts], label: str, compress: bool) -> list[Measurement]:
    """The same without any I/O: what encoding and verifying alone allow."""
    size, writes, reads = sum(spec.nbytes for spec, _ in states[0]), [], []
    catalog = open_catalog("memory://")
    await catalog.open(MARKER)
    points = await _session(catalog, len(states))
    for (position, chain_hash), parts in zip(points, states, strict=True):
        store = CheckpointStore(catalog, open_blobs("memory://"), compress=compress)
        began = time.perf_counter()
        saved = await _save(store, position, chain_hash, parts)
        writes.append(size / (time.perf_counter() - began) / 1e9)
        began = time.perf_counter()
        async for _ in store.load(saved.manifest, [spec for spec, _ in parts]):
            pass
        reads.append(size / (time.perf_counter() - began) / 1e9)
    case = f"no I/O at all, {label}, a state of {size / 1e6:.0f} MB"
    return [
        Measurement(case, "write", "GB/s", statistics.median(writes)),
        Measurement(case, "read", "GB/s", statistics.median(reads)),
    ]


# --- by hand -------------------------------------------------------------------------------------------------------
def tensors(parts: Parts) -> dict[str, torch.Tensor]:
    """The state as a dictionary of tensors: what a user has in hand."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return {
        spec.name: torch.frombuffer(bytearray(data), dtype=dtypes[spec.dtype]).reshape(spec.shape)
        for spec, data in parts
    }


def files_by_hand(folder: Path, states: list[Parts]) -> Rates:
    """torch.save to a file and fsync; torch.load of it. No digest, nothing shared, nothing atomic."""
    size, writes, reads = sum(spec.nbytes for spec, _ in states[0]), [], []
    path = folder / "by-hand.pt"
    for parts in states:
        state = tensors(parts)
        began = time.perf_counter()
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        writes.append(size / (time.perf_counter() - began) / 1e9)
        forget(path)
        began = time.perf_counter()
        torch.load(path, weights_only=True)
        reads.append(size / (time.perf_counter() - began) / 1e9)
    stored = path.stat().st_size
    path.unlink()
    return Rates(statistics.median(writes), statistics.median(reads), stored)


def server_by_hand(port: int, states: list[Parts]) -> Rates:
    """torch.save into memory and SET of the whole; GET and torch.load."""
    size, writes, reads = sum(spec.nbytes for spec, _ in states[0]), [], []
    with redis.Redis(port=port, socket_timeout=60) as client:
        for parts in states:
            state = tensors(parts)
            began = time.perf_counter()
            buffer = io.BytesIO()
            torch.save(state, buffer)
            client.set("state", buffer.getbuffer())
            writes.append(size / (time.perf_counter() - began) / 1e9)
            began = time.perf_counter()
            torch.load(io.BytesIO(client.get("state")), weights_only=True)
            reads.append(size / (time.perf_counter() - began) / 1e9)
    return Rates(statistics.median(writes), statistics.median(reads), len(buffer.getbuffer()))
