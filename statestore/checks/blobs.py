"""Blobs, tier by tier: what manifests name and what they don't."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from forkpoint.errors import BlobError, BlobMissingError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.fetch import fetch_ahead
from forkpoint.statestore.findings import Finding, Severity
from forkpoint.statestore.manifest import ManifestPart
from forkpoint.statestore.scan import PAGE
from forkpoint.statestore.tiers import Role, Tier, tiers_of
from forkpoint.statestore.wrappers.forward import innermost


@runtime_checkable
class SelfChecking(Protocol):
    """A backend that can look at itself more closely than its port lets anyone."""

    async def self_check(self) -> list[Finding]:
        """Findings that only this backend can see."""
        ...


@dataclass(slots=True)
class _Copies:
    """What the tiers have of one blob that is not whole everywhere."""

    problems: list[tuple[Tier, BlobError]] = field(default_factory=list)
    """Tiers whose copy is damaged, or missing where it should be."""
    is_cached: bool = False
    """A cache tier has it whole."""


async def blob_findings(blobs: BlobStore, wanted: Mapping[str, ManifestPart]) -> AsyncIterator[Finding]:
    """Fetch and verify all copies of all that manifests name; name what no manifest does. A blob is lost only when no
    tier has it whole; a copy that is not whole beside one that is costs nothing but that tier's use."""
    tiers = tiers_of(blobs)
    durable = [tier for tier in tiers if tier.role is Role.DURABLE]
    bad = dict[str, _Copies]()
    for tier in (*durable, *(tier for tier in tiers if tier.role is Role.CACHE)):
        async for part, raw in fetch_ahead(tier.blobs, list(wanted.values())):
            if not isinstance(raw, BlobError):
                if tier.role is Role.CACHE and part.digest in bad:
                    bad[part.digest].is_cached = True
            elif tier.role is Role.DURABLE or not isinstance(raw, BlobMissingError):
                bad.setdefault(part.digest, _Copies()).problems.append((tier, raw))
    for digest, copies in bad.items():
        for finding in _judge(wanted[digest], copies, durable):
            yield finding
    for tier in tiers:
        inner = innermost(tier.blobs)
        if isinstance(inner, SelfChecking):
            for finding in await inner.self_check():
                yield finding
    for tier in durable:
        async for digest in tier.blobs.digests():
            if digest not in wanted:
                detail = "no manifest names it" if len(tiers) == 1 else f"no manifest names it (tier {tier.label})"
                yield Finding(Severity.WARNING, "ORPHAN_BLOB", f"blob {digest}", detail)


def _judge(part: ManifestPart, copies: _Copies, durable: list[Tier]) -> list[Finding]:
    """The findings of one blob: one, if it is lost, else one for each copy that is not whole."""
    where, subject = f"blob {part.digest}", (part.digest, str(part.spec.nbytes))
    bad = [tier for tier, _ in copies.problems]
    if copies.is_cached or any(tier not in bad for tier in durable):
        return [
            Finding(
                Severity.WARNING,
                "TIER_LACKS_BLOB" if isinstance(error, BlobMissingError) else "TIER_BLOB_DAMAGED",
                where,
                f"tier {tier.label}: {error}; another tier has it whole",
                subject,
            )
            for tier, error in copies.problems
        ]
    damage = [error for _, error in copies.problems if not isinstance(error, BlobMissingError)]
    if damage:
        return [Finding(Severity.ERROR, "BLOB_DAMAGED", where, str(damage[0]), subject)]
    return [Finding(Severity.ERROR, "BLOB_MISSING", where, f"part {part.spec.name} names it", subject)]


async def condemned_findings(catalog: Catalog, wanted: Mapping[str, ManifestPart]) -> AsyncIterator[Finding]:
    """Blobs that a collection condemned and did not absolve: it was interrupted, or is under way."""
    for collector in await catalog.list_collectors():
        after, left, named = "", 0, list[str]()
        while page := await catalog.list_condemned(collector.tier, after, PAGE):
            after, left = page[-1], left + len(page)
            named += [digest for digest in page if digest in wanted]
        if left:
            who = f"{collector.holder} collects it" if collector.holder else "nobody collects it now"
            detail = f"{left} blobs are condemned, {len(named)} of them named by manifests; {who}: the next gc goes on"
            yield Finding(Severity.WARNING, "CONDEMNED_LEFT", f"tier {collector.tier}", detail)
