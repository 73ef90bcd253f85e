"""Looks into the demo's store while no server is running, and adds up what checkpoints take."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from forkpoint.cli.demo.story import Remains
from forkpoint.client.client import Client
from forkpoint.statestore.open import open_catalog, read_marker


def catalog_url(store: Path) -> str:
    """Where a server with this data folder keeps its catalog."""
    return f"sqlite://{store / 'catalog.sqlite'}"


async def remains(store: Path) -> dict[str, Remains]:
    """Log and newest checkpoint of every session that a dead server left, by name."""
    marker = read_marker(catalog_url(store))
    if marker is None:
        return {}
    catalog = open_catalog(catalog_url(store))
    await catalog.open(marker)
    try:
        found = dict[str, Remains]()
        for row in await catalog.list_sessions(None, None, 1000):
            points = [
                checkpoint.grid_position
                for name in (row.name, row.parent)
                if name is not None
                for checkpoint in await catalog.list_checkpoints(name)
                # A child shares its parent's checkpoints up to where it was forked.
                if checkpoint.grid_position <= (row.fork_position if name == row.parent else row.head - 1)
            ]
            found[str(row.name)] = Remains(row.head, max(points, default=0))
        return found
    finally:
        await catalog.close()


@dataclass(frozen=True)
class StoreSize:
    """All checkpoints of some sessions. Bytes are raw, before compression, except `on_disk`."""

    checkpoints: int
    distinct: int
    """Bytes of parts, each digest once."""
    shared: int
    """Bytes that would be stored again without sharing."""
    on_disk: int
    """Bytes of the blob files."""


async def store_size(client: Client, sessions: Iterable[str], store: Path) -> StoreSize:
    """Add up the checkpoints of `sessions` (full names)."""
    digests, total, count = dict[str, int](), 0, 0
    seen = set[tuple[int, bytes]]()
    for session in sessions:
        async for checkpoint in client.checkpoints.list(session):
            key = (checkpoint.grid_position, checkpoint.chain_hash)
            if key in seen:
                continue  # another name for the same state
            seen.add(key)
            count += 1
            total += sum(part.bytes for part in checkpoint.parts)
            digests.update((part.blake3, part.bytes) for part in checkpoint.parts)
    distinct = sum(digests.values())
    files = (path for path in (store / "blobs").rglob("*") if path.is_file())
    return StoreSize(count, distinct, total - distinct, sum(path.stat().st_size for path in files))
