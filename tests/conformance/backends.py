"""The backends that the conformance suite runs on.

To run it on a backend of your own, put `module:function` into FORKPOINT_CONFORMANCE; the function takes no arguments
and returns a list of Backend values. The tests use nothing but the two ports.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from forkpoint.clock import Clock
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.memory.lru import HostMemoryBlobs
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from forkpoint.statestore.tiers import Role, Tier, TieredBlobs
from forkpoint.statestore.wrappers.faults import FaultInjectingBlobs, FaultRates
from forkpoint.statestore.wrappers.limit import LimitedBlobs
from forkpoint.statestore.wrappers.meter import MeteredBlobs
from forkpoint.statestore.wrappers.retry import Backoff, RetryingBlobs
from tests.conformance.losing import RepeatingCatalog
from tests.support.redis_servers import PRODUCTS, binary
from tests.support.redis_stores import redis_blobs, redis_catalog


@dataclass(frozen=True)
class Backend:
    """One backend: how to make its catalog or its blobs in an empty folder. A second call with the same folder opens
    the same store when `persistent`."""

    label: str
    catalog: Callable[[Path, Clock], Catalog] | None = None
    blobs: Callable[[Path], BlobStore] | None = None
    persistent: bool = True
    namespaces: bool = False
    """One place holds a store for every namespace."""
    missing: str = ""
    """Why it can't be had on this machine; its tests are skipped."""


def _redis(label: str) -> Backend:
    return Backend(
        label,
        lambda folder, clock: redis_catalog(label, folder, clock),
        lambda folder: redis_blobs(label, folder),
        namespaces=True,
        missing=_missing(label),
    )


def _missing(label: str) -> str:
    product = label.partition("-")[0]
    return "" if binary(product) else f"{product}'s server is not installed"


def faulty(backend: Backend) -> Backend:
    """The same behind faults, and behind whoever makes calls again that failed. A catalog's also lose their answers;
    a blob store's don't: a put that is made again can't tell whether the blob that it finds is its own."""
    inner_catalog, inner_blobs = backend.catalog, backend.blobs

    def catalog(folder: Path, clock: Clock) -> Catalog:
        assert inner_catalog is not None
        return RepeatingCatalog.over(inner_catalog(folder, clock))

    def blobs(folder: Path) -> BlobStore:
        assert inner_blobs is not None
        faults = FaultInjectingBlobs(inner_blobs(folder), FaultRates(before=0.3), seed=1)
        return RetryingBlobs(faults, Backoff(tries=20, first_seconds=0.0))

    return replace(
        backend,
        label=f"{backend.label}+faults",
        catalog=catalog if inner_catalog else None,
        blobs=blobs if inner_blobs else None,
    )


def _tiers(folder: Path) -> BlobStore:
    """Host memory, then files, then other files that stand for a shared store."""
    return TieredBlobs(
        [
            Tier("host", HostMemoryBlobs(1 << 20), Role.CACHE),
            Tier("local", FileBlobs(folder / "local")),
            Tier("shared", LimitedBlobs(MeteredBlobs(FileBlobs(folder / "shared", survives_node=True)))),
        ]
    )


def backends() -> list[Backend]:
    """Ours, and those that the environment names."""
    alone = [
        Backend("memory", lambda folder, clock: MemoryCatalog(clock), lambda folder: MemoryBlobs(), persistent=False),
        Backend("sqlite", lambda folder, clock: SqliteCatalog(folder / "catalog.db", clock)),
        Backend("file", None, lambda folder: FileBlobs(folder / "blobs")),
        *map(_redis, PRODUCTS),
    ]
    # What Redis adds to Valkey is the server, which never sees these faults; its blobs' cost little.
    faults = [replace(backend, catalog=None) if backend.label == "redis" else backend for backend in alone]
    found = [*alone, *map(faulty, faults), _redis("valkey-cluster"), Backend("tiers", None, _tiers)]
    for entry in filter(None, os.environ.get("FORKPOINT_CONFORMANCE", "").split(",")):
        module, _, function = entry.partition(":")
        found.extend(getattr(importlib.import_module(module), function)())
    return found
