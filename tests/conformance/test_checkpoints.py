"""Checkpoints and manifests in the catalog."""

from dataclasses import replace

import pytest

from forkpoint.errors import (
    AlreadyExistsError,
    InvalidFieldError,
    NotFoundError,
    PositionBeyondHeadError,
    PreconditionError,
    StaleEpochError,
)
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, ForkSessions
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.records import CheckpointRow, ManifestRow
from tests.support.store import MARKER, name, new, owned, request

TOKENS = tuple(range(100, 170))
POINTS = dict(grid_hashes(root_hash(MARKER), TOKENS))


async def filled(catalog: Catalog, session: str = "s") -> None:
    await owned(catalog, session)
    await catalog.append(AppendTokens(name(session), 1, TOKENS))


async def manifests(catalog: Catalog) -> list[ManifestRow]:
    return [scanned.row for scanned in await catalog.scan_manifests(0, 1000)]


def row(checkpoint: str, position: int, session: str = "s", numerics_id: str = "n") -> CheckpointRow:
    grid = position // 16 * 16
    return CheckpointRow(name(session), checkpoint, position, grid, POINTS[grid], numerics_id, True, 0)


async def test_a_checkpoint_comes_back_with_its_manifest(catalog: Catalog) -> None:
    await filled(catalog)
    saved = await catalog.put_checkpoint(row("c1", 40), b"\x00manifest\xff", 1)
    assert saved == replace(row("c1", 40), create_us=saved.create_us)
    assert await catalog.get_checkpoint(name("s"), "c1") == (saved, b"\x00manifest\xff")
    assert await catalog.list_checkpoints(name("s")) == [saved]
    (manifest,) = await manifests(catalog)
    assert (manifest.numerics_id, manifest.grid_position, manifest.chain_hash) == ("n", 32, POINTS[32])
    assert manifest.manifest == b"\x00manifest\xff"


async def test_checkpoints_are_listed_by_position(catalog: Catalog) -> None:
    await filled(catalog)
    for checkpoint, position in (("a", 64), ("b", 0), ("c", 33), ("d", 70)):
        await catalog.put_checkpoint(row(checkpoint, position), b"m", 1)
    assert [found.checkpoint for found in await catalog.list_checkpoints(name("s"))] == ["b", "c", "a", "d"]


async def test_a_refused_checkpoint_leaves_nothing(catalog: Catalog) -> None:
    await filled(catalog)
    with pytest.raises(StaleEpochError):
        await catalog.put_checkpoint(row("c1", 40), b"m", 0)
    with pytest.raises(PositionBeyondHeadError):
        await catalog.put_checkpoint(replace(row("c1", 40), position=71), b"m", 1)
    with pytest.raises(InvalidFieldError):
        await catalog.put_checkpoint(replace(row("c1", 40), grid_position=33), b"m", 1)
    with pytest.raises(InvalidFieldError):
        await catalog.put_checkpoint(replace(row("c1", 40), grid_position=48), b"m", 1)
    with pytest.raises(PreconditionError):
        await catalog.put_checkpoint(replace(row("c1", 40), chain_hash=POINTS[48]), b"m", 1)
    assert await manifests(catalog) == []
    with pytest.raises(NotFoundError):
        await catalog.get_checkpoint(name("s"), "c1")


async def test_a_checkpoint_id_is_taken_once(catalog: Catalog) -> None:
    await filled(catalog)
    await catalog.put_checkpoint(row("c1", 40), b"m", 1)
    with pytest.raises(AlreadyExistsError):
        await catalog.put_checkpoint(row("c1", 64), b"m", 1)


async def test_the_same_state_again_keeps_the_stored_manifest(catalog: Catalog) -> None:
    await filled(catalog)
    await catalog.put_checkpoint(row("c1", 40), b"first", 1)
    await catalog.put_checkpoint(row("c2", 47), b"second", 1)
    await catalog.put_checkpoint(row("c3", 40, numerics_id="other"), b"third", 1)
    assert (await catalog.get_checkpoint(name("s"), "c2"))[1] == b"first"
    assert (await catalog.get_checkpoint(name("s"), "c3"))[1] == b"third"
    assert len(await manifests(catalog)) == 2


async def test_a_stored_manifest_is_replaced_only_when_that_is_asked_for(catalog: Catalog) -> None:
    await filled(catalog)
    await catalog.put_checkpoint(row("c1", 40), b"damaged", 1)
    await catalog.put_checkpoint(row("c2", 40), b"whole", 1, replace_manifest=True)
    for checkpoint in ("c1", "c2"):
        assert (await catalog.get_checkpoint(name("s"), checkpoint))[1] == b"whole"
    assert len(await manifests(catalog)) == 1


async def test_manifests_are_found_by_prefix_whoever_wrote_them(catalog: Catalog) -> None:
    await filled(catalog, "s")
    await filled(catalog, "t")
    await catalog.put_checkpoint(row("c1", 16, "s"), b"m16", 1)
    await catalog.put_checkpoint(row("c2", 48, "s"), b"m48", 1)
    await catalog.put_checkpoint(row("c3", 48, "t", "other"), b"o48", 1)
    points = [(position, POINTS[position]) for position in (0, 16, 32, 48)]
    found = await catalog.find_manifests(points)
    assert [(hit.grid_position, hit.numerics_id, hit.manifest) for hit in found] == [
        (48, "n", b"m48"),
        (48, "other", b"o48"),
        (16, "n", b"m16"),
    ]
    assert await catalog.find_manifests([(48, POINTS[16]), (16, POINTS[48])]) == []
    assert await catalog.find_manifests([]) == []


async def test_after_a_rewind_only_checkpoints_on_the_chain_are_listed(catalog: Catalog) -> None:
    await filled(catalog)
    for position in (16, 32, 48, 40):
        await catalog.put_checkpoint(row(f"c{position}", position), b"m", 1)
    await catalog.rewind(name("s"), 1, 35)
    assert [found.checkpoint for found in await catalog.list_checkpoints(name("s"))] == ["c16", "c32", "c40"]
    await catalog.append(AppendTokens(name("s"), 1, tuple(range(30))))
    assert [found.checkpoint for found in await catalog.list_checkpoints(name("s"))] == ["c16", "c32", "c40"]
    await catalog.rewind(name("s"), 1, 35)
    await catalog.append(AppendTokens(name("s"), 1, TOKENS[35:]))
    assert [found.checkpoint for found in await catalog.list_checkpoints(name("s"))] == ["c16", "c32", "c40", "c48"]


async def test_a_fork_lists_its_own_checkpoints_only_and_finds_all(catalog: Catalog) -> None:
    await filled(catalog)
    await catalog.put_checkpoint(row("c1", 32), b"m", 1)
    await catalog.fork(ForkSessions(name("s"), 50, (new("c"),)))
    assert await catalog.list_checkpoints(name("c")) == []
    await catalog.put_checkpoint(row("c1", 48, "c"), b"m", 0)
    assert [found.grid_position for found in await catalog.list_checkpoints(name("c"))] == [48]
    assert len(await catalog.find_manifests(list(POINTS.items()))) == 2


async def test_a_checkpoint_is_deleted_and_its_manifest_stays(catalog: Catalog) -> None:
    await filled(catalog)
    saved = await catalog.put_checkpoint(replace(row("c1", 40), expire_us=7), b"m", 1)
    assert await catalog.delete_checkpoint(name("s"), "c1", request("r")) == saved
    assert await catalog.list_checkpoints(name("s")) == []
    assert len(await manifests(catalog)) == 1
    assert await catalog.delete_checkpoint(name("s"), "c1", request("r")) == saved
    with pytest.raises(NotFoundError):
        await catalog.delete_checkpoint(name("s"), "c1", request("other"))
    again = await catalog.put_checkpoint(row("c1", 40), b"m", 1)
    assert (again.expire_us, again.create_us > saved.create_us) == (None, True)
