"""Looks at the store of a server that is not running."""

from pathlib import Path

from forkpoint.statestore.check import Finding, Severity, check
from forkpoint.statestore.open import open_blobs, open_catalog, read_marker


def catalog_url(folder: Path) -> str:
    """The catalog of a server that was started with `--data folder`."""
    return f"sqlite://{folder / 'catalog.sqlite'}"


def blobs_url(folder: Path) -> str:
    """Its blobs."""
    return f"file://{folder / 'blobs'}"


async def check_store(folder: Path) -> list[Finding]:
    """What is wrong with the store, warnings left out."""
    marker = read_marker(catalog_url(folder))
    assert marker is not None, f"no store in {folder}"
    catalog, blobs = open_catalog(catalog_url(folder)), open_blobs(blobs_url(folder))
    await catalog.open(marker)
    try:
        return [finding async for finding in check(catalog, blobs) if finding.severity is Severity.ERROR]
    finally:
        await catalog.close()
        await blobs.close()
