"""A node that lost a session and has not heard of it must not answer from memory."""

import asyncio
from dataclasses import replace

import pytest

from forkpoint.errors import PositionBeyondHeadError, SessionRelocatingError, StoreUnavailableError
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.server.session.api import GenerateCall
from forkpoint.statestore.calls import AppendTokens
from tests.support.hash_engine import HashEngine, continuation
from tests.support.moving import ends_well, move
from tests.support.session_site import FAST, Running, Site, key, until

PROMPT = list(b"who owns this")
LATER = list(b" is not who thinks so")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


@pytest.fixture
async def pair(site: Site) -> tuple[Running, Running, SessionName]:
    """Two nodes. The first owned the session and has not heard that the second does."""
    patient = replace(FAST, lease_ttl_seconds=60.0)  # none of the two is ever taken for dead
    first = await site.node(HashEngine(context_limit=64), options=patient)
    await first.workflow()
    name = await first.session("s")
    await first.append(name, PROMPT)
    await first.idle(name)
    second = await site.node(HashEngine(context_limit=64), options=patient)
    row = await second.catalog.get_session(name)
    taken = await second.catalog.acquire(name, second.node.incarnation, row.epoch)
    await second.catalog.append(AppendTokens(name, taken.epoch, tuple(LATER)))
    return first, second, name


async def test_a_rewind_to_what_a_later_owner_wrote_is_not_refused(pair: tuple[Running, Running, SessionName]) -> None:
    first, second, name = pair
    at = len(PROMPT) + 5
    with pytest.raises(SessionRelocatingError):
        await first.node.rewind(name, at, None)
    assert (await second.node.rewind(name, at, None)).row.head == at
    with pytest.raises(PositionBeyondHeadError):
        await second.node.rewind(name, at + 1, None)


async def test_an_append_that_a_later_owner_made_room_for_is_not_refused(
    pair: tuple[Running, Running, SessionName],
) -> None:
    first, second, name = pair
    await second.node.rewind(name, 2, None)
    with pytest.raises(SessionRelocatingError):
        await first.append(name, bytes(60))
    assert (await second.append(name, bytes(60))).outcome.head == 62


async def test_a_cancel_reaches_the_generation_of_a_later_owner(pair: tuple[Running, Running, SessionName]) -> None:
    first, second, name = pair
    second.engine.step_pause = 0.01
    read, task = second.reading(GenerateCall(name, key("g"), max_tokens=25))
    await until(lambda: len(read.tokens) > 2)
    with pytest.raises(SessionRelocatingError):
        await first.node.cancel_generation(name)
    await second.node.cancel_generation(name)
    await task
    assert read.tokens == continuation(PROMPT + LATER, len(read.tokens), GREEDY)[0]


async def test_a_reader_that_comes_back_to_the_wrong_node_is_sent_on(
    pair: tuple[Running, Running, SessionName],
) -> None:
    first, second, name = pair
    second.engine.step_pause = 0.01
    read, task = second.reading(GenerateCall(name, key("g"), max_tokens=20))
    await until(lambda: len(read.tokens) > 2)
    with pytest.raises(SessionRelocatingError):
        await first.generate(GenerateCall(name, key("g"), max_tokens=20))
    await task


async def test_a_resume_is_not_acknowledged_by_a_node_that_lost_the_session(
    pair: tuple[Running, Running, SessionName],
) -> None:
    first, second, name = pair
    with pytest.raises(SessionRelocatingError):
        await first.node.resume(name, key("resume"))
    assert (await second.node.resume(name, key("resume"))).view.row.head == len(PROMPT + LATER)


async def test_an_answer_that_the_store_must_confirm_waits_for_the_store(
    pair: tuple[Running, Running, SessionName],
) -> None:
    first, _, name = pair
    first.faults.before["get_session"] = StoreUnavailableError("catalog", "cut off")
    with pytest.raises(StoreUnavailableError):
        await first.node.rewind(name, len(PROMPT) + 5, None)
    with pytest.raises(StoreUnavailableError):
        async with asyncio.timeout(5):
            await first.node.cancel_generation(name)
    first.faults.heal()


async def test_a_session_that_comes_back_before_its_loss_was_heard_of_leaves_nothing(
    site: Site, pair: tuple[Running, Running, SessionName]
) -> None:
    first, second, name = pair
    assert len(first.engine.sequences) == 1, "the first one has it on its engine still"
    await until(lambda: bool(second.node.others) and bool(first.node.others))
    await second.append(name, b"!")
    reports = await move(second, name, first)
    assert reports[-1].view is not None
    await ends_well(site, name, [*PROMPT, *LATER, *b"!"], first)
    assert len(first.engine.sequences) == 1
