"""Whole stores, page by page: no list of a million rows is ever held."""

from collections.abc import AsyncIterator
from typing import Final

from forkpoint.ids import SessionName
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.collection import CollectionCatalog
from forkpoint.statestore.records import CheckpointRow, ScannedManifest, SessionRow

PAGE: Final = 1000
"""Rows of one transaction."""
MANIFEST_PAGE: Final = 64
"""Manifests of one transaction: one of a million tokens is more than a megabyte."""


async def all_sessions(catalog: Catalog, workflow: str | None = None) -> AsyncIterator[SessionRow]:
    """Every session, deleted ones too, ascending by name; of one workflow, when given."""
    after: SessionName | None = None
    while rows := await catalog.list_sessions(workflow, after, PAGE, show_deleted=True):
        for row in rows:
            yield row
        after = rows[-1].name


async def all_checkpoints(catalog: Catalog, workflow: str) -> AsyncIterator[CheckpointRow]:
    """Every checkpoint of a workflow, ascending by session and id."""
    after: tuple[str, str] | None = None
    while rows := await catalog.scan_checkpoints(workflow, after, PAGE):
        for row in rows:
            yield row
        after = rows[-1].session.session, rows[-1].checkpoint


async def stored_sizes(blobs: BlobStore) -> dict[bytes, int]:
    """Stored bytes of every blob of a tier, by its digest as bytes."""
    found: dict[bytes, int] = {}
    page: list[str] = []

    async def measure() -> None:
        for digest, size in zip(page, await blobs.sizes(page), strict=True):
            found[bytes.fromhex(digest)] = size or 0
        page.clear()

    async for digest in blobs.digests():
        page.append(digest)
        if len(page) == PAGE:
            await measure()
    await measure()
    return found


async def all_manifests(catalog: CollectionCatalog, after: int = 0) -> AsyncIterator[ScannedManifest]:
    """Every manifest with a number above `after`, ascending."""
    while found := await catalog.scan_manifests(after, MANIFEST_PAGE):
        for scanned in found:
            yield scanned
        after = found[-1].number
