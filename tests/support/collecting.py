"""A small store to collect: a workflow `w`, states that are functions of their tokens, and looks at what is left."""

import hashlib
from dataclasses import dataclass, field

from forkpoint.parts import PartSpec
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.calls import AppendTokens, ForkSessions
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.checkpoint import CheckpointStore, SavedCheckpoint
from forkpoint.statestore.gc import Collector, CollectorOptions
from forkpoint.statestore.gcreport import CollectionReport
from forkpoint.statestore.manifest import digests_in
from forkpoint.statestore.records import CheckpointRow, ManifestRow, NodeRow, SessionRow, SessionState
from forkpoint.statestore.retention import RetentionPolicy
from forkpoint.statestore.scan import all_manifests, all_sessions
from tests.support.store import MARKER, ManualClock, name, new, owned

POLICY = RetentionPolicy(2, 0)
EAGER = CollectorOptions(POLICY, grace_seconds=0)


def part(*facts: object) -> tuple[PartSpec, bytes]:
    """A part whose bytes are a function of `facts`, under their name."""
    seed = repr(facts).encode()
    return PartSpec("part." + "-".join(map(str, facts)), "uint8", (64,)), hashlib.sha512(seed).digest()


@dataclass(slots=True)
class Yard:
    """A catalog, a tier of blobs, savers and collectors over them. Sessions are of workflow `w`, owned at epoch 1."""

    catalog: Catalog
    blobs: BlobStore
    clock: ManualClock = field(default_factory=ManualClock)

    async def session(self, session: str = "s", tokens: int = 200) -> None:
        """A new session with so many tokens."""
        await owned(self.catalog, session)
        await self.append(session, tokens)

    async def append(self, session: str, tokens: int) -> None:
        """More tokens, each a function of its position alone: sessions share all of their prefixes."""
        row = await self._own(session)
        more = tuple(range(1000 + row.head, 1000 + row.head + tokens))
        await self.catalog.append(AppendTokens(name(session), row.epoch, more))

    async def rewind(self, session: str, position: int) -> None:
        """Turn it back."""
        await self.catalog.rewind(name(session), (await self._own(session)).epoch, position)

    async def _own(self, session: str) -> SessionRow:
        """The session, taken if nobody has it: only an owner writes."""
        row = await self.catalog.get_session(name(session))
        return row if row.owner else await self.catalog.acquire(row.name, "yard", row.epoch)

    async def fork(self, parent: str, child: str, position: int | None = None) -> None:
        """A child, which nobody owns yet."""
        await self.catalog.fork(ForkSessions(name(parent), position, (new(child),)))

    async def save(
        self,
        session: str,
        grid: int,
        checkpoint: str = "",
        automatic: bool = True,
        store: CheckpointStore | None = None,
        parts: tuple[tuple[PartSpec, bytes], ...] | None = None,
    ) -> SavedCheckpoint:
        """Checkpoint a session at a grid position. Its parts: one that all checkpoints share, one a 64-token page, one
        of the position alone."""
        row = await self.catalog.get_session(name(session))
        tokens = (await self.catalog.read_log(name(session), 0, grid)).token_ids
        chain_hash = dict(grid_hashes(root_hash(MARKER), tokens))[grid]
        pages = [part("page", page, tokens[page * 64]) for page in range(grid // 64)]
        return await (store or self.store()).save(
            session=name(session),
            epoch=row.epoch,
            checkpoint=checkpoint or f"c{grid}",
            position=grid,
            grid_position=grid,
            chain_hash=chain_hash,
            numerics_ids=("n",),
            model_digest=MARKER.model_digest,
            tokenizer_digest=MARKER.tokenizer_digest,
            layout="layout",
            parts=parts or (part("common"), *pages, part("grid", grid, chain_hash.hex())),
            automatic=automatic,
        )

    def store(self) -> CheckpointStore:
        """A saver that does not wait between its tries."""

        async def rest(seconds: float) -> None:
            self.clock.now_us += int(seconds * 1e6)

        return CheckpointStore(self.catalog, self.blobs, rest)

    def collector(self, options: CollectorOptions = EAGER, holder: str = "collector") -> Collector:
        """A collector of the tier."""
        return Collector(self.catalog, self.blobs, options, self.clock, holder)

    async def collect(self, collector: Collector | None = None, dry_run: bool = False) -> CollectionReport:
        """One whole collection; another holder's counter is left standing still for long enough before."""
        collector = collector or self.collector()
        if not dry_run and not await collector.election.stand():
            self.clock.now_us += 60_000_000
        return await finish(collector, dry_run)

    async def register(self, incarnation: str, numerics_id: str = "n") -> None:
        """A node."""
        await self.catalog.register_node(NodeRow(incarnation, incarnation, "", numerics_id))

    async def digests(self) -> set[str]:
        """All blobs of the tier."""
        return {digest async for digest in self.blobs.digests()}

    async def rows(self) -> set[str]:
        """All checkpoints, as session/checkpoint."""
        rows = await self.catalog.scan_checkpoints("w", None, 10_000)
        return {f"{row.session.session}/{row.checkpoint}" for row in rows}

    async def missing(self) -> list[str]:
        """Blobs that a manifest names and the tier lacks: there must never be one."""
        named = await self._named()
        sizes = await self.blobs.sizes(named)
        return [digest for digest, size in zip(named, sizes, strict=True) if size is None]

    async def garbage(self) -> set[str]:
        """Blobs that no manifest names."""
        return await self.digests() - set(await self._named())

    async def _named(self) -> list[str]:
        manifests = [scanned.row.manifest async for scanned in all_manifests(self.catalog)]
        return [digest.hex() for manifest in manifests for digest in digests_in(manifest)]

    async def named_by(self, row: ManifestRow) -> list[str]:
        """The blobs that a manifest names."""
        return [digest.hex() for digest in digests_in(row.manifest)]

    async def usable(self, session: str) -> CheckpointRow | None:
        """What a session would be restored from."""
        row = await self.catalog.get_session(name(session))
        return await self.catalog.nearest_checkpoint(name(session), row.head)

    async def alive(self) -> list[str]:
        """Sessions that are not deleted."""
        return [
            row.name.session async for row in all_sessions(self.catalog, "w") if row.state is not SessionState.DELETED
        ]


async def finish(collector: Collector, dry_run: bool = False) -> CollectionReport:
    """Run one collection to its end."""
    *_, report = [report async for report in collector.collect(dry_run)]
    assert report.done
    return report
