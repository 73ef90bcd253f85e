"""Blobs are stored once, whoever needs them: forks, other sessions with the same beginning, later checkpoints."""

import random

from forkpoint.ids import SessionName
from forkpoint.limits import PAGE_TOKENS
from forkpoint.server.session.api import CheckpointView
from forkpoint.statestore.records import CheckpointPolicy
from tests.support.session_site import Running

NO_CADENCE = CheckpointPolicy(0)
RANDOM = random.Random(11)
SHARED = [RANDOM.randrange(97, 123) for _ in range(4 * PAGE_TOKENS)]


def tail(count: int) -> list[int]:
    """Tokens that nobody else has."""
    return [RANDOM.randrange(97, 123) for _ in range(count)]


async def filled(node: Running, session: str, tokens: list[int]) -> SessionName:
    name = await node.session(session, policy=NO_CADENCE)
    await node.append(name, tokens)
    return name


async def checkpoint(node: Running, name: SessionName) -> CheckpointView:
    return await node.node.create_checkpoint(name, "c", None)


def pages(view: CheckpointView) -> list[str]:
    return [part.blake3 for part in view.parts if part.name.startswith("mla.page.")]


async def stored(node: Running) -> set[str]:
    return {digest async for digest in node.site.blobs.digests()}


async def test_forks_share_the_pages_before_the_fork_and_have_their_own_behind_it(node: Running) -> None:
    parent = await filled(node, "s", SHARED + tail(8))
    whole = pages(await checkpoint(node, parent))
    assert len(set(whole)) == 4
    before = await stored(node)
    children = await node.fork(parent, "a", "b", position=4 * PAGE_TOKENS)
    views = []
    for child in children:
        await node.append(child, tail(PAGE_TOKENS))
        views.append(await checkpoint(node, child))
    for view in views:
        assert pages(view)[:4] == whole
        assert view.bytes_shared >= 4 * PAGE_TOKENS * 8
    assert len({pages(view)[4] for view in views}) == 2
    assert len(await stored(node) - before) == 4, "a page and a KDA part for each child"


async def test_sessions_that_begin_alike_share_pages_though_they_never_met(node: Running) -> None:
    one = await checkpoint(node, await filled(node, "one", SHARED + tail(PAGE_TOKENS)))
    two = await checkpoint(node, await filled(node, "two", SHARED + tail(PAGE_TOKENS)))
    assert pages(one)[:4] == pages(two)[:4]
    assert pages(one)[4] != pages(two)[4]
    same = await checkpoint(node, await filled(node, "same", await node.log(SessionName("w", "two"))))
    assert same.parts == two.parts and same.bytes_stored == 0


async def test_a_partial_last_page_is_a_blob_over_its_valid_rows(node: Running) -> None:
    name = await filled(node, "s", SHARED[: PAGE_TOKENS + 16])
    first = await checkpoint(node, name)
    assert [part.bytes for part in first.parts][1:] == [PAGE_TOKENS * 8, 16 * 8]
    await node.append(name, SHARED[PAGE_TOKENS + 16 : PAGE_TOKENS + 48])
    second = await node.node.create_checkpoint(name, "d", None)
    await node.append(name, SHARED[PAGE_TOKENS + 48 : 2 * PAGE_TOKENS])
    third = await node.node.create_checkpoint(name, "e", None)
    assert [part.bytes for part in second.parts][1:] == [PAGE_TOKENS * 8, 48 * 8]
    assert [part.bytes for part in third.parts][1:] == [PAGE_TOKENS * 8, PAGE_TOKENS * 8]
    assert pages(first)[0] == pages(second)[0] == pages(third)[0]
    assert len({pages(view)[1] for view in (first, second, third)}) == 3
    full = await checkpoint(node, await filled(node, "full", SHARED[: 2 * PAGE_TOKENS]))
    assert pages(full) == pages(third), "once it is full it is the page that anybody else has"


async def test_a_tree_of_forks_stores_each_page_once(node: Running) -> None:
    """A page is a function of the tokens up to its end: there are as many blobs as there are such prefixes."""
    trunk = await filled(node, "t", SHARED)
    names = [trunk, *await node.fork(trunk, *(f"c{index}" for index in range(8)))]
    for index, name in enumerate(names[1:]):
        await node.append(name, [97 + index % 3] * PAGE_TOKENS)
    prefixes = set[tuple[int, ...]]()
    digests = set[str]()
    for name in names:
        view = await checkpoint(node, name)
        log = await node.log(name)
        ends = range(PAGE_TOKENS, view.row.grid_position + 1, PAGE_TOKENS)
        prefixes |= {tuple(log[:end]) for end in ends}
        digests |= set(pages(view))
    assert len(digests) == len(prefixes) == 4 + 3
