"""What garbage collection asks a catalog: manifests as a whole, pins, collectors, condemned blobs."""

import pytest

from forkpoint.errors import NotFoundError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.errors import BlobsCondemnedError, StaleCollectorError
from forkpoint.statestore.records import CheckpointRow, CollectorRow, ManifestKey, Pin, ScannedManifest
from tests.conformance.conftest import OpenCatalog
from tests.support.store import MARKER, name, owned

TOKENS = tuple(range(100, 170))
POINTS = dict(grid_hashes(root_hash(MARKER), TOKENS))
A, B, C, D = (f"{index:064x}" for index in range(1, 5))


def key(grid: int, numerics_id: str = "n") -> ManifestKey:
    return ManifestKey(POINTS[grid], grid, numerics_id)


async def put(
    catalog: Catalog,
    grid: int,
    digests: tuple[str, ...] = (),
    since: int = 0,
    checkpoint: str = "",
    replace_manifest: bool = False,
) -> None:
    if not await catalog.list_workflows("", 1):
        await owned(catalog, "s")
        await catalog.append(AppendTokens(name("s"), 1, TOKENS))
    row = CheckpointRow(name("s"), checkpoint or f"c{grid}", grid, grid, POINTS[grid], "n", True, 0)
    await catalog.put_checkpoint(
        row, f"m{checkpoint}".encode(), 1, replace_manifest=replace_manifest, digests=digests, since=since
    )


async def scan(catalog: Catalog, after: int = 0, limit: int = 99) -> list[ScannedManifest]:
    return await catalog.scan_manifests(after, limit)


async def refused(catalog: Catalog, digests: tuple[str, ...], since: int) -> tuple[str, ...]:
    """What put_checkpoint refuses of `digests`."""
    count = len(await catalog.list_checkpoints(name("s"))) if await catalog.list_workflows("", 1) else 0
    try:
        await put(catalog, 16, digests, since, f"try{count}")
    except BlobsCondemnedError as error:
        assert len(await catalog.list_checkpoints(name("s"))) == count
        return error.digests
    return ()


async def test_manifests_are_scanned_in_the_order_in_which_they_were_written(catalog: Catalog) -> None:
    for grid in (48, 16, 32):
        await put(catalog, grid)
    found = await scan(catalog)
    assert [scanned.row.grid_position for scanned in found] == [48, 16, 32]
    numbers = [scanned.number for scanned in found]
    assert numbers == sorted(set(numbers))
    assert min(numbers) > 0
    assert await scan(catalog, numbers[0], 1) == found[1:2]
    assert await scan(catalog, numbers[1]) == found[2:]
    assert await scan(catalog, numbers[2]) == []


async def test_a_scan_that_goes_on_sees_what_was_written_or_replaced_since(catalog: Catalog) -> None:
    for grid in (16, 32):
        await put(catalog, grid)
    last = (await scan(catalog))[-1].number
    await put(catalog, 16, checkpoint="again")
    assert await scan(catalog, last) == []
    await put(catalog, 16, checkpoint="healed", replace_manifest=True)
    await put(catalog, 48)
    assert [(found.row.grid_position, found.row.manifest) for found in await scan(catalog, last)] == [
        (16, b"mhealed"),
        (48, b"m"),
    ]
    assert [found.row.grid_position for found in await scan(catalog)] == [32, 16, 48]


async def test_numbers_of_removed_manifests_are_not_given_again(catalog: Catalog) -> None:
    await put(catalog, 16)
    (first,) = await scan(catalog)
    await catalog.delete_checkpoint(name("s"), "c16")
    assert await catalog.remove_manifest(key(16))
    await put(catalog, 32)
    (second,) = await scan(catalog)
    assert second.number > first.number


async def test_a_manifest_is_removed_only_when_nothing_names_it(catalog: Catalog) -> None:
    await put(catalog, 16)
    await put(catalog, 16, checkpoint="two")
    assert not await catalog.remove_manifest(key(16))
    await catalog.delete_checkpoint(name("s"), "c16")
    assert not await catalog.remove_manifest(key(16))
    assert [found.held for found in await scan(catalog)] == [True]
    assert await catalog.drop_checkpoints("w", await catalog.lineage("w"), [("s", "two")])
    assert [found.held for found in await scan(catalog)] == [False]
    assert not await catalog.remove_manifest(key(16, "other"))
    assert not await catalog.remove_manifest(key(32))
    assert await catalog.remove_manifest(key(16))
    assert not await catalog.remove_manifest(key(16))
    assert await scan(catalog) == []
    assert await catalog.find_manifests([(16, POINTS[16])]) == []


async def test_a_manifest_of_a_deleted_session_is_held_while_its_checkpoint_is_there(catalog: Catalog) -> None:
    await put(catalog, 16)
    await catalog.delete_session(name("s"), 0)
    assert [found.held for found in await scan(catalog)] == [True]
    assert not await catalog.remove_manifest(key(16))


async def test_a_pinned_manifest_stays(catalog: Catalog) -> None:
    await put(catalog, 16)
    await catalog.pin(Pin("p1", "i1", key(16)))
    await catalog.pin(Pin("p2", "i2", key(16)))
    await catalog.delete_checkpoint(name("s"), "c16")
    for pin in ("p1", "p2"):
        assert not await catalog.remove_manifest(key(16))
        assert [found.held for found in await scan(catalog)] == [True]
        await catalog.unpin(pin)
        await catalog.unpin(pin)
    assert await catalog.remove_manifest(key(16))


async def test_a_manifest_that_is_gone_cannot_be_pinned(catalog: Catalog) -> None:
    with pytest.raises(NotFoundError):
        await catalog.pin(Pin("p", "i", key(16)))
    await put(catalog, 16)
    with pytest.raises(NotFoundError):
        await catalog.pin(Pin("p", "i", key(16, "other")))
    assert await catalog.list_pins() == []


async def test_pins_are_listed_and_a_pin_moves(catalog: Catalog) -> None:
    for grid in (16, 32):
        await put(catalog, grid)
    await catalog.pin(Pin("b", "i2", key(16)))
    await catalog.pin(Pin("a", "i1", key(16)))
    await catalog.pin(Pin("b", "i2", key(32)))
    pins = await catalog.list_pins()
    assert [(pin.pin, pin.holder, pin.key) for pin in pins] == [("a", "i1", key(16)), ("b", "i2", key(32))]
    assert all(pin.create_us > 0 for pin in pins)


async def test_a_collector_is_elected_at_the_term_that_was_seen(catalog: Catalog) -> None:
    assert await catalog.get_collector("t") == CollectorRow("t", "", 0, 0)
    assert await catalog.elect_collector("t", "i1", 0) == CollectorRow("t", "i1", 1, 1)
    with pytest.raises(StaleCollectorError):
        await catalog.elect_collector("t", "i2", 0)
    assert [await catalog.renew_collector("t", 1) for _ in range(2)] == [2, 3]
    assert await catalog.get_collector("t") == CollectorRow("t", "i1", 1, 3)
    assert await catalog.elect_collector("t", "i2", 1) == CollectorRow("t", "i2", 2, 1)
    assert await catalog.get_collector("other") == CollectorRow("other", "", 0, 0)
    await catalog.elect_collector("a", "i3", 0)
    assert await catalog.list_collectors() == [CollectorRow("a", "i3", 1, 1), CollectorRow("t", "i2", 2, 1)]


async def test_a_collector_whose_term_is_over_can_do_nothing(catalog: Catalog) -> None:
    await catalog.elect_collector("t", "i1", 0)
    await catalog.condemn("t", 1, [A])
    await catalog.elect_collector("t", "i2", 1)
    for late in (
        catalog.renew_collector("t", 1),
        catalog.condemn("t", 1, [B]),
        catalog.absolve("t", 1, [A]),
        catalog.condemn("never", 1, [A]),
    ):
        with pytest.raises(StaleCollectorError):
            await late
    await catalog.resign_collector("t", 1)
    assert (await catalog.get_collector("t")).holder == "i2"
    assert await catalog.list_condemned("t", "", 9) == [A]
    assert await catalog.absolutions() == 0


async def test_a_collector_that_resigns_leaves_its_term(catalog: Catalog) -> None:
    await catalog.elect_collector("t", "i1", 0)
    await catalog.resign_collector("t", 1)
    await catalog.resign_collector("t", 1)
    row = await catalog.get_collector("t")
    assert (row.holder, row.term) == ("", 1)
    assert (await catalog.elect_collector("t", "i2", 1)).term == 2


async def test_a_manifest_that_names_a_condemned_blob_is_refused(catalog: Catalog) -> None:
    await catalog.elect_collector("t", "i1", 0)
    await catalog.elect_collector("u", "i2", 0)
    await catalog.condemn("t", 1, [A, B])
    await catalog.condemn("t", 1, [A])
    await catalog.condemn("u", 1, [A, C])
    assert sorted(await refused(catalog, (A, D, C), 99)) == [A, C]
    await catalog.absolve("t", 1, [A, B])
    assert sorted(await refused(catalog, (A, B, C, D), 99)) == [A, C]
    assert await refused(catalog, (B, D), 99) == ()
    await catalog.absolve("u", 1, [A, C])
    assert await refused(catalog, (A, B, C, D), 99) == ()


async def test_blobs_absolved_since_the_saver_looked_are_refused(catalog: Catalog) -> None:
    await catalog.elect_collector("t", "i1", 0)
    await catalog.condemn("t", 1, [A, B])
    assert await catalog.absolutions() == 0
    await catalog.absolve("t", 1, [A])
    assert await catalog.absolutions() == 1
    await catalog.absolve("t", 1, [B, D])
    assert await catalog.absolutions() == 2, "a blob that was not condemned takes no number"
    await catalog.absolve("t", 1, [A, B])
    assert await catalog.absolutions() == 2
    assert await refused(catalog, (A, B, C), 0) == (A, B)
    assert await refused(catalog, (A, B, C), 1) == (B,)
    assert await refused(catalog, (A, B, C), 2) == ()
    await catalog.condemn("t", 1, [A])
    await catalog.absolve("t", 1, [A])
    assert await refused(catalog, (A, B, C), 2) == (A,)


async def test_a_saver_older_than_the_notes_is_refused_everything(catalog: Catalog) -> None:
    await catalog.elect_collector("t", "i1", 0)
    await catalog.condemn("t", 1, [A, B, C])
    await catalog.absolve("t", 1, [A, B, C])
    await catalog.forget_absolutions(2)
    assert await refused(catalog, (D,), 1) == (D,)
    assert await refused(catalog, (A, B, C, D), 2) == (C,)
    assert await refused(catalog, (), 0) == ()
    await catalog.forget_absolutions(99)
    assert await catalog.absolutions() == 3
    assert await refused(catalog, (A, D), 2) == (A, D)
    assert await refused(catalog, (A, D), 3) == ()
    await catalog.condemn("t", 1, [D])
    await catalog.absolve("t", 1, [D])
    assert await catalog.absolutions() == 4
    assert await refused(catalog, (A, D), 3) == (D,)


async def test_what_is_condemned_is_listed_page_by_page_until_it_is_absolved(catalog: Catalog) -> None:
    await catalog.elect_collector("t", "i1", 0)
    await catalog.elect_collector("u", "i1", 0)
    await catalog.condemn("t", 1, [C, A, D, B])
    await catalog.condemn("u", 1, [A])
    assert await catalog.list_condemned("t", "", 3) == [A, B, C]
    assert await catalog.list_condemned("t", C, 3) == [D]
    await catalog.absolve("t", 1, [B, C])
    assert await catalog.list_condemned("t", "", 9) == [A, D]
    assert await catalog.list_condemned("u", "", 9) == [A]
    assert await catalog.list_condemned("none", "", 9) == []


async def test_a_collection_survives_closing_and_opening(catalog: Catalog, another: OpenCatalog) -> None:
    await put(catalog, 16)
    await catalog.pin(Pin("p", "i", key(16)))
    await catalog.elect_collector("t", "i1", 0)
    await catalog.condemn("t", 1, [A, B])
    await catalog.absolve("t", 1, [B])
    scanned = await scan(catalog)
    await catalog.close()
    again = await another()
    assert await scan(again) == scanned
    assert [pin.pin for pin in await again.list_pins()] == ["p"]
    assert await again.get_collector("t") == CollectorRow("t", "i1", 1, 1)
    assert await again.list_condemned("t", "", 9) == [A]
    assert await refused(again, (A, B, C), 0) == (A, B)
