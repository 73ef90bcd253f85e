"""What retention asks a catalog: every checkpoint, which one a session needs, and removal by a judged tree."""

from dataclasses import replace

import pytest

from forkpoint.errors import NotFoundError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, ForkSessions
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.records import CheckpointPolicy, CheckpointRow
from tests.support.store import MARKER, name, new, owned

TOKENS = tuple(range(100, 170))
OTHERS = tuple(range(500, 600))


def points(*tokens: int) -> dict[int, bytes]:
    return dict(grid_hashes(root_hash(MARKER), tokens))


async def filled(catalog: Catalog, session: str = "s") -> None:
    await owned(catalog, session)
    await catalog.append(AppendTokens(name(session), 1, TOKENS))


async def put(
    catalog: Catalog,
    session: str,
    grid: int,
    tokens: tuple[int, ...] = TOKENS,
    epoch: int = 1,
    numerics_id: str = "n",
    checkpoint: str = "",
) -> CheckpointRow:
    chain_hash = points(*tokens)[grid]
    row = CheckpointRow(name(session), checkpoint or f"c{grid}", grid, grid, chain_hash, numerics_id, True, 0)
    return await catalog.put_checkpoint(row, b"m", epoch)


async def nearest(catalog: Catalog, session: str, position: int, numerics_id: str | None = None) -> str | None:
    row = await catalog.nearest_checkpoint(name(session), position, numerics_id)
    return None if row is None else f"{row.session.session}/{row.checkpoint}"


async def test_a_scan_goes_through_a_workflow_page_by_page(catalog: Catalog) -> None:
    for session in ("b", "a"):
        await filled(catalog, session)
        for grid in (48, 16, 32):
            await put(catalog, session, grid)
    await owned(catalog, "s", workflow="other")
    seen: list[tuple[str, str]] = []
    after: tuple[str, str] | None = None
    while page := await catalog.scan_checkpoints("w", after, 4):
        after = page[-1].session.session, page[-1].checkpoint
        seen += [(row.session.session, row.checkpoint) for row in page]
    assert seen == [(session, f"c{grid}") for session in ("a", "b") for grid in (16, 32, 48)]
    assert await catalog.scan_checkpoints("other", None, 4) == []
    assert await catalog.scan_checkpoints("none", None, 4) == []


async def test_a_scan_shows_what_lies_off_the_chain_and_what_deleted_sessions_had(catalog: Catalog) -> None:
    await filled(catalog)
    saved = [await put(catalog, "s", grid) for grid in (16, 64)]
    await catalog.rewind(name("s"), 1, 20)
    assert await catalog.scan_checkpoints("w", None, 9) == saved
    await catalog.delete_session(name("s"), 0)
    assert await catalog.scan_checkpoints("w", None, 9) == saved


async def test_the_nearest_checkpoint_is_the_highest_at_or_below(catalog: Catalog) -> None:
    await filled(catalog)
    for grid in (16, 48):
        await put(catalog, "s", grid)
    found = [await nearest(catalog, "s", position) for position in (0, 15, 16, 47, 48, 999)]
    assert found == [None, None, "s/c16", "s/c16", "s/c48", "s/c48"]
    with pytest.raises(NotFoundError):
        await catalog.nearest_checkpoint(name("x"), 9)


async def test_the_nearest_checkpoint_may_be_asked_of_one_numerics_id(catalog: Catalog) -> None:
    await filled(catalog)
    await put(catalog, "s", 16, numerics_id="old")
    await put(catalog, "s", 32)
    assert await nearest(catalog, "s", 99, "old") == "s/c16"
    assert await nearest(catalog, "s", 99, "n") == "s/c32"
    assert await nearest(catalog, "s", 99, "none") is None


async def test_a_child_is_near_to_what_its_ancestors_made_before_the_fork(catalog: Catalog) -> None:
    await filled(catalog)
    for grid in (16, 32, 48, 64):
        await put(catalog, "s", grid)
    await catalog.fork(ForkSessions(name("s"), 50, (new("c"),)))
    await catalog.fork(ForkSessions(name("c"), 40, (new("g"),)))
    assert await nearest(catalog, "c", 999) == "s/c48"
    assert await nearest(catalog, "g", 999) == "s/c32"
    await catalog.acquire(name("c"), "node-a", 0)
    await catalog.append(AppendTokens(name("c"), 1, OTHERS))
    await put(catalog, "c", 64, TOKENS[:50] + OTHERS)
    assert await nearest(catalog, "c", 999) == "c/c64"
    assert await nearest(catalog, "c", 63) == "s/c48"
    assert await nearest(catalog, "g", 999) == "s/c32"


async def test_a_checkpoint_at_one_position_off_the_chain_is_not_near(catalog: Catalog) -> None:
    await filled(catalog)
    for grid in (16, 32, 48):
        await put(catalog, "s", grid)
    await catalog.fork(ForkSessions(name("s"), 50, (new("c"),)))
    await catalog.rewind(name("s"), 1, 20)
    await catalog.append(AppendTokens(name("s"), 1, OTHERS))
    await put(catalog, "s", 48, TOKENS[:20] + OTHERS, checkpoint="again")
    assert await nearest(catalog, "s", 47) == "s/c16"
    assert await nearest(catalog, "s", 48) == "s/again"
    assert await nearest(catalog, "c", 48) == "s/c48"


async def test_a_deleted_parent_and_a_deleted_child_are_still_near(catalog: Catalog) -> None:
    await filled(catalog)
    await put(catalog, "s", 32)
    await catalog.fork(ForkSessions(name("s"), 50, (new("c"),)))
    await catalog.delete_session(name("s"), 0)
    assert await nearest(catalog, "c", 99) == "s/c32"
    await catalog.delete_session(name("c"), 0)
    assert await nearest(catalog, "c", 99) == "s/c32"


async def test_the_lineage_grows_with_every_session_made_forked_or_rewound(catalog: Catalog) -> None:
    assert await catalog.lineage("w") == 0
    seen = []
    await owned(catalog, "s")
    seen.append(await catalog.lineage("w"))
    await catalog.append(AppendTokens(name("s"), 1, TOKENS))
    assert await catalog.lineage("w") == seen[-1]
    await catalog.fork(ForkSessions(name("s"), 50, (new("c"), new("d"))))
    seen.append(await catalog.lineage("w"))
    await catalog.rewind(name("s"), 1, 20)
    seen.append(await catalog.lineage("w"))
    assert seen == sorted(set(seen))
    await owned(catalog, "s", workflow="other")
    assert await catalog.lineage("w") == seen[-1]


async def test_checkpoints_are_dropped_also_off_the_chain_and_of_deleted_sessions(catalog: Catalog) -> None:
    await filled(catalog)
    await filled(catalog, "t")
    for session, grid in (("s", 16), ("s", 64), ("t", 16), ("t", 32)):
        await put(catalog, session, grid)
    await catalog.rewind(name("s"), 1, 20)
    await catalog.delete_session(name("t"), 0)
    lineage = await catalog.lineage("w")
    for _ in range(2):
        assert await catalog.drop_checkpoints("w", lineage, [("s", "c64"), ("t", "c16"), ("no", "c1")])
    left = [(row.session.session, row.checkpoint) for row in await catalog.scan_checkpoints("w", None, 9)]
    assert left == [("s", "c16"), ("t", "c32")]


@pytest.mark.parametrize("change", ["create", "fork", "rewind"])
async def test_nothing_is_dropped_once_the_tree_has_grown(catalog: Catalog, change: str) -> None:
    await filled(catalog)
    await put(catalog, "s", 16)
    lineage = await catalog.lineage("w")
    if change == "create":
        await catalog.create_session(new("other"))
    elif change == "fork":
        await catalog.fork(ForkSessions(name("s"), 20, (new("c"),)))
    else:
        await catalog.rewind(name("s"), 1, 20)
    assert not await catalog.drop_checkpoints("w", lineage, [("s", "c16")])
    assert len(await catalog.scan_checkpoints("w", None, 9)) == 1
    assert await catalog.drop_checkpoints("w", await catalog.lineage("w"), [("s", "c16")])
    assert await catalog.scan_checkpoints("w", None, 9) == []


async def test_a_checkpoint_keeps_when_it_expires_and_a_session_how_many_it_keeps(catalog: Catalog) -> None:
    await filled(catalog)
    row = CheckpointRow(name("s"), "c", 16, 16, points(*TOKENS)[16], "n", False, 0, 1_800_000_000_000_000)
    saved = await catalog.put_checkpoint(row, b"m", 1)
    assert saved == replace(row, create_us=saved.create_us)
    assert await catalog.list_checkpoints(name("s")) == [saved]
    policy = CheckpointPolicy(512, True, 7)
    assert (await catalog.update_session(name("s"), None, policy=policy)).policy == policy
    await catalog.create_session(new("t", policy=policy))
    assert (await catalog.get_session(name("t"))).policy == policy
