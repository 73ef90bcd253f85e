"""Forks and rewinds: shared pasts, separate futures."""

import random

import pytest

from forkpoint.errors import (
    AlreadyExistsError,
    InvalidFieldError,
    NotFoundError,
    PositionBeyondHeadError,
)
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, ForkSessions
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.check import check
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.records import SessionState
from tests.support.store import MARKER, name, new, owned


async def tokens_of(catalog: Catalog, session: str) -> list[int]:
    return list((await catalog.read_log(name(session), 0, 100_000)).token_ids)


def head_hash(tokens: list[int]) -> bytes:
    chain = HashChain.root(MARKER)
    chain.extend(tokens)
    return chain.head_hash()


@pytest.mark.parametrize("position", [0, 1, 15, 16, 17, 39, 40, None])
async def test_children_share_the_past_and_nothing_later(catalog: Catalog, position: int | None) -> None:
    await owned(catalog, "s")
    tokens = list(range(40))
    for start in range(0, 40, 7):
        await catalog.append(AppendTokens(name("s"), 1, tuple(tokens[start : start + 7])))
    outcome = await catalog.fork(ForkSessions(name("s"), position, (new("a", seed=1), new("b", seed=2))))
    cut = 40 if position is None else position
    assert (outcome.position, outcome.replayed) == (cut, False)
    for child, seed in zip(outcome.children, (1, 2), strict=True):
        assert (child.head, child.head_hash, child.epoch, child.owner) == (cut, head_hash(tokens[:cut]), 0, "")
        assert (child.parent, child.fork_position, child.seed) == (name("s"), cut, seed)
        assert child.state is SessionState.ACTIVE
    await catalog.acquire(name("a"), "n", 0)
    await catalog.append(AppendTokens(name("a"), 1, (1000, 1001)))
    await catalog.append(AppendTokens(name("s"), 1, (2000,)))
    assert await tokens_of(catalog, "a") == [*tokens[:cut], 1000, 1001]
    assert await tokens_of(catalog, "b") == tokens[:cut]
    assert await tokens_of(catalog, "s") == [*tokens, 2000]
    assert (await catalog.get_session(name("a"))).head_hash == head_hash([*tokens[:cut], 1000, 1001])


async def test_a_fork_is_refused_as_a_whole(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await owned(catalog, "taken")
    await catalog.append(AppendTokens(name("s"), 1, (1,)))
    with pytest.raises(AlreadyExistsError):
        await catalog.fork(ForkSessions(name("s"), 1, (new("a"), new("taken"))))
    with pytest.raises(AlreadyExistsError):
        await catalog.fork(ForkSessions(name("s"), 1, (new("a"), new("a"))))
    with pytest.raises(PositionBeyondHeadError):
        await catalog.fork(ForkSessions(name("s"), 2, (new("a"),)))
    with pytest.raises(InvalidFieldError):
        await catalog.fork(ForkSessions(name("s"), -1, (new("a"),)))
    with pytest.raises(InvalidFieldError):
        await catalog.fork(ForkSessions(name("s"), 1, (new("a", "elsewhere"),)))
    with pytest.raises(NotFoundError):
        await catalog.fork(ForkSessions(name("nobody"), 0, (new("a"),)))
    assert [row.name.session for row in await catalog.list_sessions("w", None, 9)] == ["s", "taken"]


async def test_a_rewind_swaps_the_branch_and_keeps_the_name(catalog: Catalog) -> None:
    await owned(catalog, "s")
    tokens = list(range(50))
    await catalog.append(AppendTokens(name("s"), 1, tuple(tokens)))
    before = await catalog.get_session(name("s"))
    await catalog.fork(ForkSessions(name("s"), 45, (new("old"),)))
    row, replayed = await catalog.rewind(name("s"), 1, 20)
    assert (row.head, row.head_hash, row.epoch, replayed) == (20, head_hash(tokens[:20]), 1, False)
    assert row.branch != before.branch
    assert row.revision == before.revision
    await catalog.append(AppendTokens(name("s"), 1, (7, 7)))
    assert await tokens_of(catalog, "s") == [*tokens[:20], 7, 7]
    assert await tokens_of(catalog, "old") == tokens[:45]
    with pytest.raises(PositionBeyondHeadError):
        await catalog.rewind(name("s"), 1, 23)
    row, _ = await catalog.rewind(name("s"), 1, 0)
    assert (row.head, row.head_hash) == (0, head_hash([]))
    assert await tokens_of(catalog, "s") == []


async def test_a_child_rewound_below_its_fork_shares_less(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, tuple(range(50))))
    await catalog.fork(ForkSessions(name("s"), 40, (new("c"),)))
    await catalog.acquire(name("c"), "n", 0)
    row, _ = await catalog.rewind(name("c"), 1, 10)
    assert (row.parent, row.fork_position, row.head) == (name("s"), 10, 10)
    assert await tokens_of(catalog, "c") == list(range(10))


async def test_descendants_outlive_a_deleted_parent(catalog: Catalog) -> None:
    await owned(catalog, "s")
    await catalog.append(AppendTokens(name("s"), 1, tuple(range(30))))
    await catalog.fork(ForkSessions(name("s"), 20, (new("c"),)))
    await catalog.delete_session(name("s"), 1)
    assert await tokens_of(catalog, "c") == list(range(20))
    await catalog.fork(ForkSessions(name("c"), 10, (new("g"),)))
    assert await tokens_of(catalog, "g") == list(range(10))


async def test_a_chain_of_a_thousand_forks_reads_and_forks_like_a_short_one(catalog: Catalog) -> None:
    await owned(catalog, "f0")
    tokens: list[int] = []
    for depth in range(1000):
        session = name(f"f{depth}")
        if depth:
            await catalog.fork(ForkSessions(name(f"f{depth - 1}"), None, (new(f"f{depth}"),)))
            await catalog.acquire(session, "n", 0)
        await catalog.append(AppendTokens(session, 1, (depth,)))
        tokens.append(depth)
    row = await catalog.get_session(name("f999"))
    assert (row.head, row.head_hash) == (1000, head_hash(tokens))
    assert await tokens_of(catalog, "f999") == tokens
    assert (await catalog.read_log(name("f999"), 990, 5)).token_ids == (990, 991, 992, 993, 994)
    outcome = await catalog.fork(ForkSessions(name("f999"), 500, (new("middle"),)))
    assert outcome.children[0].head_hash == head_hash(tokens[:500])


@pytest.mark.parametrize("seed", range(4))
async def test_a_random_tree_equals_lists_of_tokens(catalog: Catalog, seed: int) -> None:
    """The model: every session is a Python list; fork copies, rewind cuts, append extends."""
    rng = random.Random(seed)
    await owned(catalog, "n0")
    model: dict[str, list[int]] = {"n0": []}
    for turn in range(150):
        session = rng.choice(list(model))
        tokens = model[session]
        action = rng.random()
        if action < 0.6:
            piece = [rng.randrange(1000) for _ in range(rng.choice((1, 2, 15, 16, 17, 40)))]
            outcome = await catalog.append(AppendTokens(name(session), 1, tuple(piece)))
            tokens.extend(piece)
            assert outcome.head_hash == head_hash(tokens)
        elif action < 0.85:
            position = rng.randint(0, len(tokens))
            children = [f"n{turn}-{index}" for index in range(rng.randint(1, 3))]
            await catalog.fork(ForkSessions(name(session), position, tuple(new(child) for child in children)))
            for child in children:
                await catalog.acquire(name(child), "node-a", 0)
                model[child] = tokens[:position]
        elif action < 0.95:
            position = rng.randint(0, len(tokens))
            await catalog.rewind(name(session), 1, position)
            model[session] = tokens[:position]
        elif len(model) > 1:
            await catalog.delete_session(name(session), 1)
            del model[session]
    for session, tokens in model.items():
        assert await tokens_of(catalog, session) == tokens
        assert (await catalog.get_session(name(session))).head_hash == head_hash(tokens)
        start = rng.randint(0, len(tokens))
        assert list((await catalog.read_log(name(session), start, 20)).token_ids) == tokens[start : start + 20]
    assert [finding async for finding in check(catalog, MemoryBlobs())] == []
