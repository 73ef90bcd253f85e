"""Manifests, the checkpoints that name them, and the pins that hold them."""

from collections.abc import AsyncIterator
from hashlib import blake2b

from forkpoint.errors import BlobDamagedError, StateIncompatibleError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.checks.sessions import SessionCheck
from forkpoint.statestore.findings import Finding, Severity
from forkpoint.statestore.manifest import Manifest, ManifestPart, unseal
from forkpoint.statestore.records import ManifestKey, ManifestRow
from forkpoint.statestore.scan import all_checkpoints, all_manifests


class ManifestCheck:
    """Walks all manifests, then whatever names one; afterwards `wanted` holds every blob that one of them names."""

    def __init__(self, catalog: Catalog, sessions: SessionCheck) -> None:
        self._catalog = catalog
        self._sessions = sessions
        self._known = set[bytes]()
        self.wanted: dict[str, ManifestPart] = {}

    async def findings(self) -> AsyncIterator[Finding]:
        """All that is wrong with manifests, checkpoints and pins."""
        async for scanned in all_manifests(self._catalog):
            self._known.add(_mark(scanned.row.key))
            for finding in self._check(scanned.row):
                yield finding
        for workflow in self._sessions.workflows:
            async for row in all_checkpoints(self._catalog, workflow):
                if _mark(row.manifest_key) not in self._known:
                    subject = (row.session.workflow, row.session.session, row.checkpoint)
                    where = "/".join(subject)
                    detail = f"its manifest at {row.grid_position} does not exist"
                    yield Finding(Severity.ERROR, "MANIFEST_MISSING", where, detail, subject)
        nodes = {node.incarnation for node in await self._catalog.list_nodes()}
        for pin in await self._catalog.list_pins():
            if _mark(pin.key) not in self._known:
                detail = f"{pin.holder} holds a manifest at {pin.key.grid_position} that does not exist"
                yield Finding(Severity.ERROR, "WRONG_PIN", f"pin {pin.pin}", detail, (pin.pin,))
            elif pin.holder not in nodes:
                detail = f"its holder {pin.holder} is no registered node"
                yield Finding(Severity.WARNING, "PIN_LEFT", f"pin {pin.pin}", detail, (pin.pin, pin.holder))

    def _check(self, row: ManifestRow) -> list[Finding]:
        """One manifest. Adds its blobs."""
        where = f"manifest {row.chain_hash.hex()[:16]} at {row.grid_position} ({row.numerics_id[:16]})"
        try:
            manifest = unseal(row.manifest, where)
        except (BlobDamagedError, StateIncompatibleError) as error:
            return [Finding(Severity.ERROR, "BAD_MANIFEST", where, str(error))]
        self.wanted.update((part.digest, part) for part in manifest.parts)
        found = [Finding(Severity.ERROR, "BAD_MANIFEST", where, problem) for problem in self._problems(row, manifest)]
        if row.chain_hash not in self._sessions.points[row.grid_position] and not self._sessions.deleted:
            detail = "its chain hash lies on no session's chain"
            found.append(Finding(Severity.WARNING, "UNREACHABLE_MANIFEST", where, detail))
        return found

    def _problems(self, row: ManifestRow, manifest: Manifest) -> list[str]:
        """Where a whole manifest contradicts its key or the store."""
        marker, identity, problems = self._catalog.marker, manifest.identity, list[str]()
        if (manifest.position, manifest.chain_hash) != (row.grid_position, row.chain_hash):
            problems.append(f"it describes position {manifest.position}, {manifest.chain_hash.hex()[:16]}")
        if not manifest.numerics_ids or manifest.numerics_ids[0] != row.numerics_id:
            problems.append("it does not begin with its key's numerics id")
        if (identity.namespace, identity.model_digest, identity.tokenizer_digest) != (
            marker.namespace,
            marker.model_digest,
            marker.tokenizer_digest,
        ):
            problems.append("it belongs to another namespace, model or tokenizer")
        return problems


def _mark(key: ManifestKey) -> bytes:
    """16 bytes for a key: a million of them must be held."""
    text = f"{key.grid_position} {key.chain_hash.hex()} {key.numerics_id}"
    return blake2b(text.encode(), digest_size=16).digest()
