"""What the store has of a state is not captured again, and is captured again when it is lost."""

from collections.abc import Collection

import pytest

from forkpoint.ids import SessionName
from forkpoint.limits import PAGE_TOKENS
from forkpoint.server.engine.base import Capture
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import GenerateCall
from forkpoint.statestore.records import CheckpointPolicy
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import Running, Site, key, until

GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)
NEVER = CheckpointPolicy(0)
LONG = [7] * (3 * PAGE_TOKENS + 20)


class CountingEngine(HashEngine):
    """Notes which parts each capture copied."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: list[list[str]] = []

    def capture(self, sequence: int, known: Collection[str] = ()) -> Capture:
        captured = super().capture(sequence, known)
        self.copied.append([spec.name for spec, _ in captured.parts])
        return captured


def pages(*numbers: int) -> list[str]:
    """The parts of a capture that copied these pages."""
    return ["kda.000.state.0", *(f"mla.page.{number:06d}" for number in numbers)]


async def begun(site: Site, policy: CheckpointPolicy = NEVER) -> tuple[Running, CountingEngine, SessionName]:
    """A node, and a session that has LONG."""
    engine = CountingEngine()
    node = await site.node(engine)
    await node.workflow()
    name = await node.session("s", policy=policy)
    await node.append(name, LONG)
    await node.idle(name)
    return node, engine, name


async def lose(site: Site, digest: str) -> None:
    await site.blobs.delete([digest])
    assert not await site.blobs.has(digest)


async def test_a_page_is_copied_once_also_across_a_restore_and_a_fork(site: Site) -> None:
    node, engine, name = await begun(site)
    await node.node.create_checkpoint(name, "one", None)
    await node.append(name, [8] * PAGE_TOKENS)
    two = await node.node.create_checkpoint(name, "two", None)
    assert engine.copied == [pages(0, 1, 2, 3), pages(3, 4)]
    (child,) = await node.fork(name, "child")
    await node.append(child, [9] * PAGE_TOKENS)
    view = await node.node.create_checkpoint(child, "c", None)
    assert engine.copied[-1] == pages(4, 5)
    assert [part.blake3 for part in view.parts[:5]][1:] == [part.blake3 for part in two.parts[:5]][1:]
    await node.node.pause(name, None)
    await node.node.resume(name, None)
    await node.append(name, [8] * PAGE_TOKENS)
    await node.node.create_checkpoint(name, "three", None)
    assert engine.copied[-1] == pages(4, 5)


async def test_a_child_does_not_take_its_parents_later_pages_for_its_own(site: Site) -> None:
    """Both have a fourth page, of other tokens, and the parent's was stored first."""
    node, _, name = await begun(site)
    await node.node.create_checkpoint(name, "before", None)
    (child,) = await node.fork(name, "child")
    await node.append(name, [8] * PAGE_TOKENS)
    theirs = await node.node.create_checkpoint(name, "c", None)
    await node.append(child, [9] * PAGE_TOKENS)
    ours = await node.node.create_checkpoint(child, "c", None)
    await node.node.pause(child, None)
    result = await node.node.resume(child, None)
    assert result.restored_tokens > 3 * PAGE_TOKENS
    read = await node.generate(GenerateCall(child, key("g"), max_tokens=9))
    assert read.tokens == continuation(LONG + [9] * PAGE_TOKENS, 9, GREEDY)[0]
    assert ours.parts[4].blake3 != theirs.parts[4].blake3


async def test_a_session_that_was_rewound_stores_its_new_pages(site: Site) -> None:
    node, engine, name = await begun(site)
    await node.node.create_checkpoint(name, "one", None)
    await node.node.rewind(name, PAGE_TOKENS + 5, None)
    await node.append(name, [9] * (2 * PAGE_TOKENS))
    await node.node.create_checkpoint(name, "two", None)
    assert engine.copied[-1] == pages(0, 1, 2), "nothing was restored"
    await node.node.pause(name, None)
    await node.node.resume(name, None)
    read = await node.generate(GenerateCall(name, key("g"), max_tokens=9))
    assert read.tokens == continuation(LONG[: PAGE_TOKENS + 5] + [9] * (2 * PAGE_TOKENS), 9, GREEDY)[0]


async def test_a_checkpoint_that_is_asked_for_copies_a_lost_page_again(site: Site) -> None:
    node, engine, name = await begun(site)
    one = await node.node.create_checkpoint(name, "one", None)
    await lose(site, one.parts[2].blake3)
    await node.append(name, [8] * PAGE_TOKENS)
    two = await node.node.create_checkpoint(name, "two", None)
    assert engine.copied[1:] == [pages(3, 4), pages(0, 1, 2, 3, 4)]
    assert two.parts[2].blake3 == one.parts[2].blake3
    assert all([not part.problem async for part in node.node.verify_checkpoint(name, "two")])


async def test_after_a_checkpoint_that_failed_for_a_lost_page_the_next_one_has_all(site: Site) -> None:
    node, engine, name = await begun(site, CheckpointPolicy(PAGE_TOKENS))
    counters, live = node.node.counters, node.node._core.lives[name]
    await until(lambda: live.last_grid == 3 * PAGE_TOKENS and live.is_saved)
    (*_, newest) = await node.node.list_checkpoints(name)
    await lose(site, newest.parts[1].blake3)
    await node.append(name, [8] * (PAGE_TOKENS - 20))
    await until(lambda: counters.checkpoints_failed == 1 and live.is_saved)
    assert engine.copied[-1] == pages(3)
    await node.append(name, [8] * PAGE_TOKENS)
    await until(lambda: live.last_grid == 5 * PAGE_TOKENS and live.is_saved)
    assert engine.copied[-1] == pages(0, 1, 2, 3, 4)
    await node.append(name, [8])
    await node.node.pause(name, None)
    assert (await node.node.resume(name, None)).restored_tokens == 5 * PAGE_TOKENS
    assert counters.checkpoints_failed == 1


async def test_a_page_that_was_found_damaged_is_copied_and_written_again(site: Site) -> None:
    node, engine, name = await begun(site)
    one = await node.node.create_checkpoint(name, "one", None)
    await site.blobs.replace(one.parts[1].blake3, b"no frame")
    assert [not part.problem async for part in node.node.verify_checkpoint(name, "one")].count(False) == 1
    await node.append(name, [8] * 16)
    await node.node.create_checkpoint(name, "two", None)
    assert engine.copied[-1] == pages(0, 1, 2, 3)
    assert all([not part.problem async for part in node.node.verify_checkpoint(name, "one")])


@pytest.mark.parametrize("tokens", [16, PAGE_TOKENS - 16])
async def test_a_page_that_is_not_full_yet_is_copied_each_time(site: Site, tokens: int) -> None:
    node, engine, name = await begun(site)
    await node.node.create_checkpoint(name, "one", None)
    await node.append(name, [8] * (tokens - 4))
    await node.node.create_checkpoint(name, "two", None)
    assert engine.copied[-1] == pages(3)
