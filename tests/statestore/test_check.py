"""Check finds what is wrong and only that; repair mends what can be mended without a risk, and nothing else."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import apsw
import pytest

from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.calls import AppendTokens, ForkSessions
from forkpoint.statestore.check import Finding, Severity, check, repair
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.codec import digest_of
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.lru import HostMemoryBlobs
from forkpoint.statestore.records import NodeRow, Pin, SessionState
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from forkpoint.statestore.tiers import Role, Tier, TieredBlobs
from forkpoint.statestore.wrappers.meter import MeteredBlobs
from tests.statestore.test_checkpoint_store import SPECS, Store
from tests.support.store import MARKER, name, new, owned

NOISE = b"noise"


class TieredStore(Store):
    """The store of the checkpoint tests over host memory and two durable tiers, one checkpoint saved."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.local, self.shared = HostMemoryBlobs(1 << 20), MemoryBlobs(), MemoryBlobs()
        tiers = [Tier("host", self.cache, Role.CACHE), Tier("local", self.local), Tier("shared", self.shared)]
        self.stack = TieredBlobs(tiers)
        self.port: BlobStore = MeteredBlobs(self.stack)
        self.checkpoints = CheckpointStore(self.catalog, self.port)

    async def begin(self) -> list[str]:
        await self.fill()
        saved = await self.save()
        await self.stack.settle()
        return [part.digest for part in saved.parts]

    async def kinds(self) -> list[tuple[str, Severity]]:
        return [(finding.kind, finding.severity) for finding in await self.findings()]

    async def mend(self) -> list[tuple[str, bool]]:
        findings = await self.findings()
        return [(result.finding.kind, result.done) async for result in repair(self.catalog, self.port, findings)]


@pytest.fixture
async def store() -> TieredStore:
    return TieredStore()


async def test_a_sound_stack_yields_nothing(store: TieredStore) -> None:
    await store.begin()
    assert await store.findings() == []


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda tier, digest: tier.delete([digest]), "TIER_LACKS_BLOB"),
        (lambda tier, digest: tier.replace(digest, NOISE), "TIER_BLOB_DAMAGED"),
    ],
    ids=["missing", "damaged"],
)
@pytest.mark.parametrize("where", ["local", "shared"])
async def test_a_tier_that_lacks_a_blob_is_given_a_whole_copy(
    store: TieredStore, damage: Callable[..., object], kind: str, where: str
) -> None:
    first, second, _ = await store.begin()
    for digest in (first, second):
        await damage(getattr(store, where), digest)  # type: ignore[misc]
    assert await store.kinds() == [(kind, Severity.WARNING)] * 2
    assert await store.kinds() == [(kind, Severity.WARNING)] * 2, "looking changes nothing"
    assert {f.detail.split(":")[0] for f in await store.findings()} == {f"tier {where}"}
    assert await store.mend() == [(kind, True)] * 2
    assert await store.findings() == []


async def test_a_blob_that_only_a_cache_has_is_put_back_before_it_is_forgotten(store: TieredStore) -> None:
    first, *_ = await store.begin()
    await store.local.delete([first])
    await store.shared.replace(first, NOISE)
    assert await store.kinds() == [("TIER_LACKS_BLOB", Severity.WARNING), ("TIER_BLOB_DAMAGED", Severity.WARNING)]
    assert await store.mend() == [("TIER_LACKS_BLOB", True), ("TIER_BLOB_DAMAGED", True)]
    assert await store.findings() == []


async def test_a_damaged_cache_is_a_warning_and_an_empty_one_is_nothing(store: TieredStore) -> None:
    first, *_ = await store.begin()
    await store.cache.replace(first, NOISE)
    assert await store.kinds() == [("TIER_BLOB_DAMAGED", Severity.WARNING)]
    assert await store.mend() == [("TIER_BLOB_DAMAGED", True)]
    for digest in [digest async for digest in store.cache.digests()]:
        await store.cache.delete([digest])
    assert await store.findings() == []


async def test_a_blob_that_is_whole_nowhere_is_an_error_that_repair_leaves(store: TieredStore) -> None:
    first, second, _ = await store.begin()
    for tier in (store.cache, store.local, store.shared):
        await tier.delete([first])
        await tier.replace(second, NOISE)
    assert await store.kinds() == [("BLOB_MISSING", Severity.ERROR), ("BLOB_DAMAGED", Severity.ERROR)]
    assert await store.mend() == [("BLOB_MISSING", False), ("BLOB_DAMAGED", False)]
    again = await store.save("c2")
    assert not again.parts[0].shared


async def test_orphans_are_named_with_their_tier_and_left_to_collection(store: TieredStore) -> None:
    await store.begin()
    await store.shared.put(digest_of(NOISE), NOISE)
    (finding,) = await store.findings()
    assert (finding.kind, finding.severity) == ("ORPHAN_BLOB", Severity.WARNING)
    assert "tier shared" in finding.detail
    assert await store.mend() == [("ORPHAN_BLOB", False)]
    assert await store.shared.has(digest_of(NOISE))


def lose_manifests(store: Store) -> Callable[[], None]:
    """Returns how to bring them back."""
    tables = store.catalog._tables
    manifests, numbers = dict(tables.manifests), dict(tables.manifest_numbers)
    tables.manifests.clear()
    tables.manifest_numbers.clear()

    def bring_back() -> None:
        tables.manifests.update(manifests)
        tables.manifest_numbers.update(numbers)

    return bring_back


async def test_a_checkpoint_without_its_manifest_is_dropped_while_the_log_is_whole(store: TieredStore) -> None:
    await store.begin()
    await store.save("c2", 20)
    lose_manifests(store)
    found = [finding for finding in await store.findings() if finding.severity is Severity.ERROR]
    assert [(finding.kind, finding.where) for finding in found] == [
        ("MANIFEST_MISSING", "w/s/c1"),
        ("MANIFEST_MISSING", "w/s/c2"),
    ]
    assert [mended for mended in await store.mend() if mended[0] == "MANIFEST_MISSING"] == [
        ("MANIFEST_MISSING", True)
    ] * 2
    assert not [finding for finding in await store.findings() if finding.severity is Severity.ERROR]
    assert await store.catalog.list_checkpoints(name("s")) == []


async def test_of_a_session_whose_log_is_damaged_no_row_is_dropped(store: TieredStore) -> None:
    await store.begin()
    lose_manifests(store)
    tables = store.catalog._tables
    key = next(iter(tables.sessions))
    findings = [*await store.findings(), Finding(Severity.ERROR, "DAMAGED_LOG", str(key), "a record is damaged")]
    results = [result async for result in repair(store.catalog, store.port, findings)]
    assert {result.finding.kind: result.done for result in results}["MANIFEST_MISSING"] is False


async def test_a_manifest_that_came_back_keeps_its_checkpoint(store: TieredStore) -> None:
    await store.begin()
    bring_back = lose_manifests(store)
    findings = await store.findings()
    bring_back()
    results = [r async for r in repair(store.catalog, store.port, findings) if r.finding.kind == "MANIFEST_MISSING"]
    assert [result.what for result in results] == ["its manifest is there now"]
    assert len(await store.catalog.list_checkpoints(name("s"))) == 1


async def test_pins_of_nobody_and_of_nothing_are_let_go(store: TieredStore) -> None:
    await store.begin()
    (row,) = await store.catalog.list_checkpoints(name("s"))
    await store.catalog.pin(Pin("mine", "node-a", row.manifest_key))
    assert await store.findings() == []
    await store.catalog.pin(Pin("left", "node-gone", row.manifest_key))
    assert await store.kinds() == [("PIN_LEFT", Severity.WARNING)]
    assert await store.mend() == [("PIN_LEFT", True)]
    assert [pin.pin for pin in await store.catalog.list_pins()] == ["mine"]


async def test_an_owner_that_is_no_node_and_one_of_a_paused_session_are_found(store: TieredStore) -> None:
    await store.begin()
    await store.catalog.remove_node("node-a")
    assert await store.kinds() == [("OWNER_GONE", Severity.WARNING)]
    tables = store.catalog._tables
    (session,) = tables.sessions.values()
    session.row = replace(session.row, state=SessionState.PAUSED)
    assert await store.kinds() == [("WRONG_OWNER", Severity.ERROR)]


async def test_a_migration_that_nobody_can_finish_is_told_and_ended(store: TieredStore) -> None:
    await store.begin()
    await store.catalog.begin_migration(name("s"), 1, "move-1", "node-b")
    (finding,) = await store.findings()
    assert (finding.kind, finding.severity) == ("MIGRATION_LEFT", Severity.WARNING)
    assert "node-b is no registered node" in finding.detail
    assert await store.mend() == [("MIGRATION_LEFT", True)]
    row = await store.catalog.get_session(name("s"))
    assert (row.migration, row.owner, row.epoch) == ("", "node-a", 1)
    assert await store.findings() == []


async def test_a_migration_whose_target_came_meanwhile_goes_on(store: TieredStore) -> None:
    await store.begin()
    row = await store.catalog.begin_migration(name("s"), 1, "move-1", "node-b")
    findings = await store.findings()
    await store.catalog.register_node(NodeRow("node-b", "node-b", "", ""))
    assert await store.findings() == []
    assert [result.done async for result in repair(store.catalog, store.port, findings)] == [False]
    assert await store.catalog.get_session(name("s")) == row


async def test_a_migration_of_a_session_that_nobody_owns_is_told_and_ended(store: TieredStore) -> None:
    """As a node of a version that knows no migrations leaves it when it releases."""
    await store.begin()
    await store.catalog.begin_migration(name("s"), 1, "move-1", "node-a")
    assert await store.findings() == []
    (session,) = store.catalog._tables.sessions.values()
    session.row = replace(session.row, owner="")
    assert await store.kinds() == [("MIGRATION_LEFT", Severity.WARNING)]
    assert await store.mend() == [("MIGRATION_LEFT", True)]
    assert await store.findings() == []


async def test_what_an_interrupted_collection_condemned_is_told(store: TieredStore) -> None:
    first, *_ = await store.begin()
    collector = await store.catalog.elect_collector(store.local.tier, "node-a", 0)
    await store.catalog.condemn(store.local.tier, collector.term, [first, digest_of(NOISE)])
    (finding,) = await store.findings()
    assert (finding.kind, finding.severity) == ("CONDEMNED_LEFT", Severity.WARNING)
    assert finding.detail.startswith("2 blobs are condemned, 1 of them named")
    assert await store.mend() == [("CONDEMNED_LEFT", False)]


async def test_strange_files_among_blobs_are_told(tmp_path: Path) -> None:
    store = await Store().fill()
    files = FileBlobs(tmp_path)
    store.checkpoints, store.port = CheckpointStore(store.catalog, files), files
    digest = (await store.save()).parts[0].digest
    assert await store.findings() == []
    home = tmp_path / "blobs" / digest[:2]
    (home / "README").write_text("hello")
    (tmp_path / "blobs" / "lost+found").mkdir()
    (home / digest_of(NOISE)).write_bytes(NOISE)
    found = {(finding.kind, finding.where) for finding in await store.findings()}
    assert found == {
        ("STRANGE_FILE", str(home / "README")),
        ("STRANGE_FILE", str(tmp_path / "blobs" / "lost+found")),
        ("MISPLACED_BLOB", str(home / digest_of(NOISE))),
    }
    await files.close()


async def test_every_part_is_checked(store: TieredStore) -> None:
    digests = await store.begin()
    assert len(digests) == len(SPECS)
    for digest in digests:
        for tier in (store.cache, store.local, store.shared):
            await tier.replace(digest, NOISE)
    assert await store.kinds() == [("BLOB_DAMAGED", Severity.ERROR)] * len(SPECS)
    assert [finding async for finding in check(store.catalog, MemoryBlobs())] != []


async def test_a_record_of_an_epoch_that_its_session_never_reached_is_found(tmp_path: Path) -> None:
    catalog = SqliteCatalog(tmp_path / "catalog.db")
    await catalog.open(MARKER)
    await owned(catalog, "s")
    await catalog.acquire(name("s"), "node-a", 1)
    await catalog.append(AppendTokens(name("s"), 2, tuple(range(40))))
    await catalog.fork(ForkSessions(name("s"), 20, (new("c"),)))
    assert [finding async for finding in check(catalog, MemoryBlobs())] == []
    db = apsw.Connection(str(tmp_path / "catalog.db"))
    db.execute("UPDATE sessions SET epoch = 1 WHERE session = 's'")
    db.close()
    found = [(finding.kind, finding.where) async for finding in check(catalog, MemoryBlobs())]
    assert found == [("WRONG_EPOCH", "w/s")]
    await catalog.close()
