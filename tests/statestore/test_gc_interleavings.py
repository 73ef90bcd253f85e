"""A collector, a saver, a restorer, a fork and a second collector, in every order: no manifest ever lacks a blob."""

from collections.abc import Awaitable, Callable, Sequence

import pytest

from forkpoint.errors import NotFoundError
from forkpoint.statestore.checkpoint import CheckpointStore, SavedCheckpoint
from forkpoint.statestore.errors import BlobsCondemnedError, CollectedElsewhereError, StaleCollectorError
from forkpoint.statestore.gc import Collector
from forkpoint.statestore.gcreport import CollectionReport
from forkpoint.statestore.mark import Mark
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import Pin
from tests.support.collecting import EAGER, Yard, finish, part
from tests.support.interleaving import Explorer, Gated, Stage, explore
from tests.support.store import MARKER, ManualClock, name

PARTS = (part("one"),)
THINNING = (
    "lineage",
    "list_sessions",
    "scan_checkpoints",
    "list_checkpoints",
    "nearest_checkpoint",
    "drop_checkpoints",
)
ELECTION = ("get_collector", "elect_collector", "renew_collector", "list_collectors", "list_nodes", "list_pins")
QUIET = (*THINNING, *ELECTION, "sizes", "forget_absolutions")
"""Calls of a collector that neither read nor change what a saver or a restorer depends on."""
Scene = Callable[[Explorer], Awaitable[None]]


async def new_yard() -> Yard:
    clock = ManualClock()
    yard = Yard(MemoryCatalog(clock), MemoryBlobs(), clock)
    await yard.catalog.open(MARKER)
    await yard.session()
    await yard.register("node")
    return yard


def collecting(yard: Yard, stage: Stage, actor: str = "collector", free: Sequence[str] = QUIET) -> Collector:
    catalog, blobs = Gated.ports(yard.catalog, yard.blobs, stage, actor, free)
    return Collector(catalog, blobs, EAGER, yard.clock, actor)


def saving(yard: Yard, stage: Stage, actor: str = "saver") -> CheckpointStore:
    catalog, blobs = Gated.ports(yard.catalog, yard.blobs, stage, actor, ("find_manifests",))

    async def rest(seconds: float) -> None:
        await stage.rest(actor)

    return CheckpointStore(catalog, blobs, rest)


async def is_sound(yard: Yard) -> None:
    """Nothing is missing, nothing stays condemned, and the next collection takes all that is garbage."""
    assert await yard.missing() == []
    await yard.collect(yard.collector(holder="last"))
    assert await yard.missing() == []
    assert await yard.garbage() == set()
    assert await yard.catalog.list_condemned(yard.blobs.tier, "", 9) == []


async def leave_manifest(yard: Yard) -> None:
    """The blob that PARTS needs is there, and a manifest names it that nothing holds."""
    await yard.save("s", 16, "old", parts=PARTS)
    await yard.catalog.delete_checkpoint(name("s"), "old")


async def leave_garbage(yard: Yard) -> None:
    """As leave_manifest, and the manifest is gone as well."""
    await leave_manifest(yard)
    await yard.catalog.remove_manifest((await yard.catalog.scan_manifests(0, 1))[0].row.key)


def saver_scene(before: Callable[[Yard], Awaitable[None]], grid: int) -> Scene:
    async def scene(explorer: Explorer) -> None:
        yard, stage = await new_yard(), Stage()
        await before(yard)
        actors = {
            "saver": yard.save("s", grid, "new", store=saving(yard, stage), parts=PARTS),
            "collector": finish(collecting(yard, stage)),
        }
        results = await stage.play(actors, explorer.choose)
        assert isinstance(results["collector"], CollectionReport), results["collector"]
        assert isinstance(results["saver"], SavedCheckpoint), results["saver"]
        await is_sound(yard)
        assert await yard.rows() == {"s/new"}

    return scene


async def stall_scene(explorer: Explorer) -> None:
    """Another collector judges the first one dead, whether it is or not."""
    yard, stage = await new_yard(), Stage()
    await leave_garbage(yard)

    async def replace() -> object:
        await stage.turn("young", "wait")
        young = collecting(yard, stage, "young")
        await young.election.stand()
        yard.clock.now_us += 60_000_000
        return await finish(young)

    actors = {
        "old": finish(collecting(yard, stage, "old")),
        "young": replace(),
        "saver": yard.save("s", 16, "new", store=saving(yard, stage), parts=PARTS),
    }
    results = await stage.play(actors, explorer.choose)
    for collector in ("old", "young"):
        expected = CollectionReport, StaleCollectorError, CollectedElsewhereError
        assert isinstance(results[collector], expected), results[collector]
    assert isinstance(results["saver"], SavedCheckpoint | BlobsCondemnedError), results["saver"]
    yard.clock.now_us += 60_000_000
    await is_sound(yard)


async def restore_scene(explorer: Explorer) -> None:
    yard, stage = await new_yard(), Stage()
    await leave_manifest(yard)
    catalog, blobs = Gated.ports(yard.catalog, yard.blobs, stage, "restorer")

    async def restore() -> object:
        found = await catalog.scan_manifests(0, 9)
        if not found:
            return "nothing to restore from"
        try:
            await catalog.pin(Pin("p", "node", found[0].row.key))
        except NotFoundError:
            return "collected before it was pinned"
        loaded = CheckpointStore(catalog, blobs).load(found[0].row.manifest, [PARTS[0][0]])
        read = [bytes(data) async for _, data in loaded]
        await catalog.unpin("p")
        return read

    actors = {"restorer": restore(), "collector": finish(collecting(yard, stage))}
    results = await stage.play(actors, explorer.choose)
    assert results["restorer"] == [PARTS[0][1]] or isinstance(results["restorer"], str), results["restorer"]
    assert isinstance(results["collector"], CollectionReport), results["collector"]
    await is_sound(yard)


def tree_scene(change: str) -> Scene:
    async def scene(explorer: Explorer) -> None:
        yard, stage = await new_yard(), Stage()
        for grid in (16, 32, 48, 64):
            await yard.save("s", grid, parts=PARTS)
        if change == "undelete":
            await yard.fork("s", "sleeper", 40)
            await yard.catalog.delete_session(name("sleeper"), yard.clock.now_us + 10**9)
        near: list[int] = []

        async def grow() -> object:
            await stage.turn("user", change)
            before = await yard.catalog.nearest_checkpoint(name("s"), 40)
            near.append(0 if before is None else before.grid_position)
            if change == "fork":
                await yard.fork("s", "child", 40)
            elif change == "rewind":
                await yard.catalog.rewind(name("s"), 1, 40)
            else:
                await yard.catalog.undelete_session(name("sleeper"))
            return None

        collector = collecting(yard, stage, free=(*ELECTION, "sizes"))
        results = await stage.play({"user": grow(), "collector": finish(collector)}, explorer.choose)
        assert isinstance(results["collector"], CollectionReport), results["collector"]
        usable = await yard.usable({"fork": "child", "rewind": "s", "undelete": "sleeper"}[change])
        assert [0 if usable is None else usable.grid_position] == near
        await is_sound(yard)

    return scene


@pytest.mark.parametrize("before", [leave_garbage, leave_manifest], ids=["garbage", "manifest"])
@pytest.mark.parametrize("grid", [16, 32], ids=["the same state", "another state"])
async def test_a_saver_and_a_collector_in_every_order(before: Callable[[Yard], Awaitable[None]], grid: int) -> None:
    assert await explore(saver_scene(before, grid), preemptions=4) > 300


async def test_a_collector_that_stalls_is_replaced_and_wakes_up_in_every_order() -> None:
    assert await explore(stall_scene, preemptions=2) > 1000


async def test_a_restorer_that_has_pinned_reads_to_the_end_in_every_order() -> None:
    assert await explore(restore_scene, preemptions=4) > 100


@pytest.mark.parametrize("change", ["fork", "rewind", "undelete"])
async def test_a_tree_that_grows_under_a_collection_keeps_its_nearest_checkpoints(change: str) -> None:
    assert await explore(tree_scene(change), preemptions=2) > 15


def ignore_absolutions(patch: pytest.MonkeyPatch) -> None:
    real = MemoryCatalog._check_digests
    patch.setattr(MemoryCatalog, "_check_digests", lambda self, digests, since: real(self, digests, 1 << 60))


def ignore_the_condemned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryCatalog, "_check_digests", lambda self, digests, since: None)


def ignore_the_fence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemoryBlobs, "_check", lambda self, term: None)


def do_not_look_again(patch: pytest.MonkeyPatch) -> None:
    async def nothing(self: Mark) -> None:
        return

    patch.setattr(Mark, "catch_up", nothing)


def absolve_before_the_delete(patch: pytest.MonkeyPatch) -> None:
    async def remove(self: Collector, report: CollectionReport, mark: Mark, digests: Sequence[str]) -> None:
        await self._catalog.condemn(self._blobs.tier, self.election.term, digests)
        await mark.catch_up()
        doomed = [digest for digest in digests if bytes.fromhex(digest) not in mark.named]
        await self._absolve(digests)
        await self._blobs.delete(doomed, self.election.term)

    patch.setattr(Collector, "_remove", remove)


def ignore_pins(patch: pytest.MonkeyPatch) -> None:
    real = MemoryCatalog._held
    patch.setattr(MemoryCatalog, "_held", lambda self: real(self) - {pin.key for pin in self._tables.pins.values()})


def ignore_the_lineage(patch: pytest.MonkeyPatch) -> None:
    real = MemoryCatalog.drop_checkpoints

    async def drop(self: MemoryCatalog, workflow: str, lineage: int, rows: Sequence[tuple[str, str]]) -> bool:
        return await real(self, workflow, await self.lineage(workflow), rows)

    patch.setattr(MemoryCatalog, "drop_checkpoints", drop)


MISTAKES: dict[Callable[[pytest.MonkeyPatch], None], Scene] = {
    ignore_absolutions: saver_scene(leave_garbage, 16),
    ignore_the_condemned: saver_scene(leave_garbage, 32),
    absolve_before_the_delete: saver_scene(leave_garbage, 16),
    do_not_look_again: saver_scene(leave_garbage, 16),
    ignore_the_fence: stall_scene,
    ignore_pins: restore_scene,
    ignore_the_lineage: tree_scene("fork"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
async def test_each_mistake_is_found_out(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        await explore(MISTAKES[mistake], preemptions=2)
