"""Every inconsistency of a store, found through its ports: nothing here knows a backend."""

from collections.abc import AsyncIterator

from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.checks.blobs import SelfChecking, blob_findings, condemned_findings
from forkpoint.statestore.checks.manifests import ManifestCheck
from forkpoint.statestore.checks.sessions import SessionCheck
from forkpoint.statestore.findings import Finding, Severity
from forkpoint.statestore.repair import Repaired, repair

__all__ = ["Finding", "Repaired", "SelfChecking", "Severity", "check", "repair"]


async def check(catalog: Catalog, blobs: BlobStore) -> AsyncIterator[Finding]:
    """Yield what is wrong; a sound store yields nothing. Changes nothing. Run it on a quiet store: what a running
    node is just writing may show as an orphan blob (a warning). What the backend sees and the port shows as well is
    yielded once."""
    seen, held = set[tuple[str, str]](), list[Finding]()
    sessions = SessionCheck(catalog)
    manifests = ManifestCheck(catalog, sessions)
    if isinstance(catalog, SelfChecking):
        for finding in await catalog.self_check():
            if finding.kind == "MANIFEST_MISSING":  # seen through the port it can be mended
                held.append(finding)
                continue
            seen.add((finding.kind, finding.where))
            yield finding
    async for finding in sessions.findings():
        if (finding.kind, finding.where) not in seen:
            yield finding
    async for finding in manifests.findings():
        seen.add((finding.kind, finding.where))
        yield finding
    for finding in held:
        if (finding.kind, finding.where) not in seen:
            yield finding
    async for finding in condemned_findings(catalog, manifests.wanted):
        yield finding
    async for finding in blob_findings(blobs, manifests.wanted):
        yield finding
