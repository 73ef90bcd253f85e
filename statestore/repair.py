"""Repair of what `check` found, where nothing can be lost by it. It never deletes a blob or a token."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

from forkpoint.errors import ForkpointError, NotFoundError
from forkpoint.ids import SessionName
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.findings import Finding
from forkpoint.statestore.heal import heal_copies
from forkpoint.statestore.tiers import tiers_of
from forkpoint.statestore.wrappers.forward import innermost

COLLECTED: Final = frozenset({"ORPHAN_BLOB", "CONDEMNED_LEFT", "UNREACHABLE_MANIFEST"})
UNREADABLE: Final = frozenset({"DAMAGED_LOG", "BAD_CHAIN", "DAMAGED_ROW"})
"""What makes a session's checkpoints worth more than time."""


@runtime_checkable
class Sweeping(Protocol):
    """A blob store that can remove what belongs to no blob."""

    async def sweep(self) -> list[Finding]:
        """Remove it and say what it was. Safe while others read and write."""
        ...


@runtime_checkable
class Referring(Protocol):
    """A catalog that keeps a checkpoint and its manifest in two places."""

    async def cancel_reference(self, key: str, reference: str) -> bool:
        """Let go of a manifest that is kept for a checkpoint which does not exist. False when it exists now."""
        ...


@dataclass(frozen=True, slots=True)
class Repaired:
    """What became of one finding: whether it is put right, and what was done or why nothing was."""

    finding: Finding
    done: bool
    what: str


async def repair(catalog: Catalog, blobs: BlobStore, findings: Sequence[Finding]) -> AsyncIterator[Repaired]:
    """Put right what can be, one answer a finding, in order. Each is looked at once more before anything is done."""
    tool = _Repair(catalog, blobs, findings)
    for finding in findings:
        if finding.kind in COLLECTED:
            yield Repaired(finding, False, "left to `forkpoint gc`")
            continue
        mend = tool.mends.get(finding.kind)
        if mend is None:
            yield Repaired(finding, False, "nothing mends it without a risk")
            continue
        try:
            done, what = await mend(finding)
        except ForkpointError as error:
            done, what = False, str(error)
        yield Repaired(finding, done, what)


class _Repair:
    """How each kind of finding is mended."""

    def __init__(self, catalog: Catalog, blobs: BlobStore, findings: Sequence[Finding]) -> None:
        self._catalog = catalog
        self._blobs = blobs
        self._unreadable = {finding.where for finding in findings if finding.kind in UNREADABLE}
        self._swept: set[str] | None = None
        self.mends: dict[str, Callable[[Finding], Awaitable[tuple[bool, str]]]] = {
            **dict.fromkeys(("TIER_LACKS_BLOB", "TIER_BLOB_DAMAGED", "BLOB_DAMAGED", "BLOB_MISSING"), self._heal),
            "ORPHAN_CHUNKS": self._sweep,
            "MANIFEST_MISSING": self._drop_checkpoint,
            "WRONG_PIN": self._unpin,
            "PIN_LEFT": self._unpin,
            "LEAKED_REFERENCE": self._cancel,
            "MIGRATION_LEFT": self._end_migration,
        }

    async def _heal(self, finding: Finding) -> tuple[bool, str]:
        digest, nbytes = finding.subject
        healed = await heal_copies(self._blobs, digest, int(nbytes))
        if healed is None:
            return False, "no tier has a whole copy: the next checkpoint of the same state stores it again"
        if healed.failed:
            return False, f"a whole copy could not be put into {', '.join(healed.failed)}"
        return True, f"put whole into {', '.join(healed.healed) or 'no tier: all have it now'}"

    async def _sweep(self, finding: Finding) -> tuple[bool, str]:
        if self._swept is None:
            self._swept = set()
            for tier in tiers_of(self._blobs):
                inner = innermost(tier.blobs)
                if isinstance(inner, Sweeping):
                    self._swept.update(swept.where for swept in await inner.sweep())
        return True, "removed" if finding.where in self._swept else "it is gone"

    async def _drop_checkpoint(self, finding: Finding) -> tuple[bool, str]:
        """A row without its manifest serves nobody; while the log is whole, what it stood for can be computed again."""
        workflow, session, checkpoint = finding.subject
        name = SessionName(workflow, session)
        if str(name) in self._unreadable:
            return False, "the session's log is damaged: whatever is known of it stays"
        lineage = await self._catalog.lineage(workflow)
        try:
            await self._catalog.get_checkpoint(name, checkpoint)
        except NotFoundError:
            if await self._catalog.drop_checkpoints(workflow, lineage, [(session, checkpoint)]):
                return True, "the row was removed"
            return False, "the workflow is in use: try again"
        return True, "its manifest is there now"

    async def _unpin(self, finding: Finding) -> tuple[bool, str]:
        pin, *holder = finding.subject
        if any(node.incarnation in holder for node in await self._catalog.list_nodes()):
            return False, f"{holder[0]} is registered now"
        await self._catalog.unpin(pin)
        return True, "let go"

    async def _end_migration(self, finding: Finding) -> tuple[bool, str]:
        """An owner whose word is taken back has the session as before; no target can take it by that word then."""
        workflow, session, migration = finding.subject
        row = await self._catalog.get_session(SessionName(workflow, session))
        if row.owner and any(node.incarnation == row.migration_target for node in await self._catalog.list_nodes()):
            return False, f"{row.migration_target} is registered now"
        await self._catalog.end_migration(row.name, row.epoch, migration)
        return True, "ended"

    async def _cancel(self, finding: Finding) -> tuple[bool, str]:
        if not isinstance(self._catalog, Referring):
            return False, "the catalog keeps no references"
        if await self._catalog.cancel_reference(*finding.subject):
            return True, "taken back: the manifest is left to `forkpoint gc`"
        return True, "its checkpoint is there now"
