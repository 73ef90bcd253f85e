"""Every inconsistency of a store, found through its ports: nothing here knows a backend."""

from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Final, Protocol, runtime_checkable

from forkpoint.errors import (
    BlobDamagedError,
    BlobError,
    BlobMissingError,
    LogCorruptError,
    NotFoundError,
    StateIncompatibleError,
)
from forkpoint.limits import TILE_TOKENS
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.chain import HashChain, root_hash
from forkpoint.statestore.fetch import fetch_ahead
from forkpoint.statestore.findings import Finding, Severity
from forkpoint.statestore.manifest import Manifest, ManifestPart, unseal
from forkpoint.statestore.records import ManifestRow, SessionRow, SessionState
from forkpoint.statestore.scan import all_manifests, all_sessions

__all__ = ["Finding", "Severity", "check"]

READ_TOKENS: Final = 65_536


@runtime_checkable
class SelfChecking(Protocol):
    """A backend that can look at itself more closely than its port lets anyone."""

    async def self_check(self) -> list[Finding]:
        """Findings that only this backend can see."""
        ...


async def check(catalog: Catalog, blobs: BlobStore) -> AsyncIterator[Finding]:
    """Yield what is wrong; a sound store yields nothing. Changes nothing. Run it on a quiet store: what a running
    node is just writing may show as an orphan blob (a warning)."""
    if isinstance(catalog, SelfChecking):
        for finding in await catalog.self_check():
            yield finding
    points: dict[int, set[bytes]] = defaultdict(set)
    deleted = False
    async for row in all_sessions(catalog):
        if row.state is SessionState.DELETED:
            deleted = True
            continue
        try:
            for finding in await _check_session(catalog, row, points):
                yield finding
        except (NotFoundError, LookupError, TypeError, ValueError) as broken:
            detail = f"a row can't be read: {type(broken).__name__}: {broken}"
            yield Finding(Severity.ERROR, "DAMAGED_ROW", str(row.name), detail)
    wanted: dict[str, ManifestPart] = {}
    async for scanned in all_manifests(catalog):
        stored = scanned.row
        manifest, findings = _check_manifest(catalog, stored)
        for finding in findings:
            yield finding
        if manifest is None:
            continue
        if stored.chain_hash not in points[stored.grid_position] and not deleted:
            yield Finding(
                Severity.WARNING, "UNREACHABLE_MANIFEST", _where(stored), "its chain hash lies on no session's chain"
            )
        wanted.update((part.digest, part) for part in manifest.parts)
    async for finding in _check_blobs(blobs, wanted):
        yield finding


async def _check_session(catalog: Catalog, row: SessionRow, points: dict[int, set[bytes]]) -> list[Finding]:
    """One live session: parent, log, generations, checkpoints. Adds its grid points to `points`."""
    name, found = str(row.name), list[Finding]()

    def error(kind: str, detail: str) -> None:
        found.append(Finding(Severity.ERROR, kind, name, detail))

    if row.parent is not None:
        try:
            await catalog.get_session(row.parent)
        except NotFoundError:
            error("WRONG_PARENT", f"its parent {row.parent} does not exist")
    if not 0 <= row.fork_position <= row.head:
        error("WRONG_PARENT", f"it was forked at {row.fork_position}, its head is {row.head}")
    try:
        chain = await _walk(catalog, row, points)
        if chain.position != row.head or chain.head_hash() != row.head_hash:
            error("BAD_CHAIN", f"the log leads to {chain.position}, not to the head hash at {row.head}")
    except LogCorruptError as damage:
        error("DAMAGED_LOG", str(damage))
    generation = await catalog.open_generation(row.name)
    if generation is not None and not 0 < generation.start <= row.head:
        error("GENERATION_BEYOND_HEAD", f"generation {generation.generation} starts at {generation.start}")
    for ended in await catalog.list_generations(row.name):
        if ended.finish is not None and (ended.end is None or not ended.start <= ended.end <= row.head):
            error("GENERATION_RANGE", f"generation {ended.generation} spans {ended.start} to {ended.end}")
    try:
        for checkpoint in await catalog.list_checkpoints(row.name):
            await catalog.get_checkpoint(row.name, checkpoint.checkpoint)
    except NotFoundError as missing:
        error("MANIFEST_MISSING", str(missing))
    except LogCorruptError:
        pass  # the walk above has reported it
    return found


async def _walk(catalog: Catalog, row: SessionRow, points: dict[int, set[bytes]]) -> HashChain:
    """Read the whole log, add its grid points, return the chain at its end."""
    chain = HashChain(0, root_hash(catalog.marker))
    points[0].add(chain.grid_hash)
    while chain.position < row.head:
        part = await catalog.read_log(row.name, chain.position, READ_TOKENS)
        if not part.token_ids:
            raise LogCorruptError(str(row.name), chain.position, chain.position, "nothing more can be read")
        offset = 0
        while offset < len(part.token_ids):
            step = TILE_TOKENS - chain.position % TILE_TOKENS
            chain.extend(part.token_ids[offset : offset + step])
            offset += step
            if chain.tail == b"":
                points[chain.position].add(chain.grid_hash)
    return chain


def _where(row: ManifestRow) -> str:
    return f"manifest {row.chain_hash.hex()[:16]} at {row.grid_position} ({row.numerics_id[:16]})"


def _check_manifest(catalog: Catalog, row: ManifestRow) -> tuple[Manifest | None, list[Finding]]:
    where = _where(row)
    try:
        manifest = unseal(row.manifest, where)
    except (BlobDamagedError, StateIncompatibleError) as error:
        return None, [Finding(Severity.ERROR, "BAD_MANIFEST", where, str(error))]
    problems = []
    if (manifest.position, manifest.chain_hash) != (row.grid_position, row.chain_hash):
        problems.append(f"it describes position {manifest.position}, {manifest.chain_hash.hex()[:16]}")
    if not manifest.numerics_ids or manifest.numerics_ids[0] != row.numerics_id:
        problems.append("it does not begin with its key's numerics id")
    marker, identity = catalog.marker, manifest.identity
    if (identity.namespace, identity.model_digest, identity.tokenizer_digest) != (
        marker.namespace,
        marker.model_digest,
        marker.tokenizer_digest,
    ):
        problems.append("it belongs to another namespace, model or tokenizer")
    return manifest, [Finding(Severity.ERROR, "BAD_MANIFEST", where, problem) for problem in problems]


async def _check_blobs(blobs: BlobStore, wanted: dict[str, ManifestPart]) -> AsyncIterator[Finding]:
    """Fetch and verify all that manifests name; name what no manifest does."""
    async for part, raw in fetch_ahead(blobs, list(wanted.values())):
        if isinstance(raw, BlobMissingError):
            yield Finding(Severity.ERROR, "BLOB_MISSING", f"blob {part.digest}", f"part {part.spec.name} names it")
        elif isinstance(raw, BlobError):
            yield Finding(Severity.ERROR, "BLOB_DAMAGED", f"blob {part.digest}", str(raw))
    async for digest in blobs.digests():
        if digest not in wanted:
            yield Finding(Severity.WARNING, "ORPHAN_BLOB", f"blob {digest}", "no manifest names it")
