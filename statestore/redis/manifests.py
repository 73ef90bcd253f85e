"""Manifests, references to them and pins, all in the store's slot."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forkpoint.errors import NotFoundError
from forkpoint.statestore.errors import BlobsCondemnedError
from forkpoint.statestore.records import ManifestKey, ManifestRow, Pin, ScannedManifest
from forkpoint.statestore.redis.access import Access
from forkpoint.statestore.redis.functions import Refusal
from forkpoint.statestore.redis.hashes import (
    fields_of,
    manifest_key_of,
    manifest_key_text,
    manifest_of,
    point_text,
)


@dataclass(frozen=True, slots=True)
class NewManifest:
    """A manifest to put; over the one that is there when `replace`."""

    key: ManifestKey
    manifest: bytes
    replace: bool


async def put(access: Access, new: NewManifest, reference: str, digests: Sequence[str], since: int) -> str:
    """Put a manifest and a reference to it, in one step, and return the reference. Raises BlobsCondemnedError."""
    key = new.key
    try:
        await access.functions.write(
            access.keys.store,
            "put_manifest",
            None,
            point_text(key.chain_hash, key.grid_position),
            key.numerics_id,
            new.manifest,
            int(new.replace),
            reference,
            since,
            len(digests),
            *digests,
        )
    except Refusal as refusal:
        raise BlobsCondemnedError([bytes(digest).decode() for digest in refusal.details[0]]) from None
    return reference


async def drop_references(access: Access, references: Sequence[tuple[ManifestKey, str]]) -> None:
    """Take references away. Idempotent."""
    if references:
        parts = [part for key, reference in references for part in (manifest_key_text(key), reference)]
        await access.functions.write(access.keys.store, "drop_references", None, len(references), *parts)


async def get(access: Access, key: ManifestKey) -> bytes | None:
    """A manifest's bytes, None when there is none."""
    found = await access.functions.read(access.keys.store, "get_manifest", manifest_key_text(key))
    return None if found is None else bytes(found)


async def find(access: Access, points: Sequence[tuple[int, bytes]]) -> list[ManifestRow]:
    """Catalog.find_manifests."""
    texts = [point_text(chain_hash, position) for position, chain_hash in points]
    found = await access.functions.read(access.keys.store, "find_manifests", len(texts), *texts)
    rows = [_row(*manifest) for manifest in found]
    return sorted(rows, key=lambda row: (-row.grid_position, row.numerics_id))


async def scan(access: Access, after: int, limit: int) -> list[ScannedManifest]:
    """Catalog.scan_manifests."""
    found = await access.functions.read(access.keys.store, "scan_manifests", after, limit)
    return [ScannedManifest(int(fields_of(flat)["number"]), _row(key, flat), held == b"1") for key, flat, held in found]


async def remove(access: Access, key: ManifestKey) -> bool:
    """Catalog.remove_manifest."""
    point = point_text(key.chain_hash, key.grid_position)
    try:
        await access.functions.write(access.keys.store, "remove_manifest", None, point, key.numerics_id)
    except Refusal:
        return False
    return True


async def pin(access: Access, new: Pin) -> None:
    """Catalog.pin."""
    key = manifest_key_text(new.key)
    try:
        await access.functions.write(access.keys.store, "pin", None, new.pin, key, new.holder)
    except Refusal:
        raise NotFoundError(f"manifest {new.key.chain_hash.hex()[:16]} at {new.key.grid_position}") from None


async def unpin(access: Access, name: str) -> None:
    """Catalog.unpin."""
    await access.functions.write(access.keys.store, "unpin", None, name)


async def list_pins(access: Access) -> list[Pin]:
    """Catalog.list_pins."""
    found = await access.functions.read(access.keys.store, "list_pins")
    return [_pin(bytes(name).decode(), fields_of(flat)) for name, flat in found]


def _pin(name: str, fields: dict[str, bytes]) -> Pin:
    return Pin(name, fields["holder"].decode(), manifest_key_of(fields["key"].decode()), int(fields["create"]))


def _row(key: bytes, flat: Sequence[Any]) -> ManifestRow:
    return manifest_of(manifest_key_of(bytes(key).decode()), fields_of(flat))
