"""The backends that the conformance suite runs on.

To run it on a backend of your own, put `module:function` into FORKPOINT_CONFORMANCE; the function takes no arguments
and returns a list of Backend values. The tests use nothing but the two ports.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forkpoint.clock import Clock
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.support.redis_servers import PRODUCTS, binary
from tests.support.redis_stores import redis_catalog


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
    product = label.partition("-")[0]
    missing = "" if binary(product) else f"{product}'s server is not installed"
    return Backend(
        label,
        lambda folder, clock: redis_catalog(label, folder, clock),
        namespaces=True,
        missing=missing,
    )


def backends() -> list[Backend]:
    """Ours, and those that the environment names."""
    found = [
        Backend("memory", lambda folder, clock: MemoryCatalog(clock), lambda folder: MemoryBlobs(), persistent=False),
        Backend("sqlite", lambda folder, clock: SqliteCatalog(folder / "catalog.db", clock)),
        Backend("file", None, lambda folder: FileBlobs(folder / "blobs")),
        *(_redis(label) for label in (*PRODUCTS, "valkey-cluster")),
    ]
    for entry in filter(None, os.environ.get("FORKPOINT_CONFORMANCE", "").split(",")):
        module, _, function = entry.partition(":")
        found.extend(getattr(importlib.import_module(module), function)())
    return found
