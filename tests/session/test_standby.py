"""Hot standbys: another node has the session's state already when its owner dies, and goes on at once."""

import asyncio
from dataclasses import replace

import pytest

from forkpoint.errors import NodeCapacityError, SessionRelocatingError, StaleEpochError, UnavailableError
from forkpoint.ids import SessionName
from forkpoint.server.session.api import CreateSession, ForkCall
from forkpoint.server.session.follower import Follower
from forkpoint.server.session.live import Place
from forkpoint.server.session.ports import FollowAsk
from tests.support.hash_engine import HashEngine, continuation
from tests.support.moving import GREEDY, PROMPT, ends_well, expected, listen, move, nodes, owner_of, speaks
from tests.support.session_site import Running, Site, until


def followers(site: Site) -> list[tuple[Running, Follower]]:
    """Who follows what."""
    return [(node, follower) for node in site.nodes for follower in node.node._core.follows.values()]


async def follows(site: Site, node: Running) -> Follower:
    """The one follower there, once its state is there."""
    await until(lambda: any(at is node and follower.ready for at, follower in followers(site)))
    return next(iter(node.node._core.follows.values()))


async def test_a_standby_goes_on_when_the_owner_is_killed(memory_site: Site) -> None:
    first, second = await nodes(memory_site)
    first.engine.step_pause = 0.002
    name = await speaks(first)
    await first.node.update_session(name, None, None, None, None, standbys=1)
    stream = listen(memory_site, name, 150)
    follower = await follows(memory_site, second)
    await until(lambda: len(stream.tokens) > 20)
    live, replayed = follower.live, second.node.counters.replayed_tokens
    await first.crash()
    assert (await stream.done()).tokens == continuation(PROMPT, 150, GREEDY)[0]
    await until(lambda: name in second.node._core.lives)
    assert owner_of(memory_site, name)[1] is live, "it is the follower that goes on"
    assert second.node.counters.restores == 1, "nothing was restored for it"
    assert second.node.counters.replayed_tokens - replayed < 64, "it was near the head"
    await ends_well(memory_site, name, expected(PROMPT, 150), second)


async def test_a_standby_takes_an_idle_session_before_anybody_asks_for_it(memory_site: Site) -> None:
    first, second, third = await nodes(memory_site, 3)
    name = await speaks(first)
    await first.node.update_session(name, None, None, None, None, standbys=1)
    await until(lambda: any(follower.ready for _, follower in followers(memory_site)))
    ready = followers(memory_site)[0][0]
    other = third if ready is second else second
    await first.crash()
    with pytest.raises(SessionRelocatingError) as sent:
        await other.append(name, b"who has it?")
    assert sent.value.address == ready.options.address
    await ready.append(name, b" and on")
    assert ready.node.counters.restores == 1 and other.node.counters.restores <= 1
    await ready.node.update_session(name, None, None, None, None, standbys=0)
    await ends_well(memory_site, name, [*PROMPT, *b" and on"], ready)


async def test_a_standby_that_is_lost_is_replaced(memory_site: Site) -> None:
    first, second, third = await nodes(memory_site, 3)
    name = await speaks(first)
    await first.node.update_session(name, None, None, None, None, standbys=1)
    await until(lambda: len(followers(memory_site)) == 1)
    lost = followers(memory_site)[0][0]
    await lost.crash()
    left = third if lost is second else second
    await follows(memory_site, left)
    await first.crash()
    read = await listen(memory_site, name, 20).done()
    assert read.tokens == continuation(PROMPT, 20, GREEDY)[0]
    await ends_well(memory_site, name, expected(PROMPT, 20), left)


async def test_a_workflow_says_how_many_standbys_its_sessions_have(memory_site: Site) -> None:
    first, second, third = await nodes(memory_site, 3)
    await first.node.update_workflow("w", None, None, standbys=2)
    name = (await first.node.create_session(CreateSession(SessionName("w", "s"), 7))).row.name
    await first.append(name, PROMPT)
    await asyncio.gather(follows(memory_site, second), follows(memory_site, third))
    await first.node.update_session(name, None, None, None, None, standbys=0)
    await until(lambda: not followers(memory_site))
    assert (await first.node.get_workflow("w")).standbys == 2
    (child,) = await first.fork(name, "child")
    passing, _ = await first.node.fork(ForkCall(name, 1, session_ids=("passing",), transient=True))
    rows = [(await first.catalog.get_session(one)).standbys for one in (child, passing[0].row.name)]
    assert rows == [2, 0], "children are new sessions of the workflow; what may be thrown away needs no standby"


async def test_an_update_goes_to_the_owner_who_is_to_go_by_it(memory_site: Site) -> None:
    first, second = await nodes(memory_site)
    name = await speaks(first)
    with pytest.raises(SessionRelocatingError) as sent:
        await second.node.update_session(name, None, None, None, None, standbys=1)
    assert sent.value.address == first.options.address
    assert (await first.catalog.get_session(name)).standbys == 0


async def test_a_standby_gives_its_slot_to_the_sessions_of_its_node(memory_site: Site) -> None:
    first, second = await nodes(memory_site, slots=2)
    name = await speaks(first)
    await first.node.update_session(name, None, None, None, None, standbys=1)
    await follows(memory_site, second)
    streams = []
    for number in range(2):
        other = await speaks(second, [*PROMPT, number], f"o{number}")
        streams.append(listen(memory_site, other, 40, f"g{number}"))
    for number, stream in enumerate(streams):
        assert (await stream.done()).tokens == continuation([*PROMPT, number], 40, GREEDY)[0]
    assert not followers(memory_site), "it went before anything of the node was parked"
    assert second.node.counters.parked == 0


async def test_a_session_moves_to_its_own_standby(memory_site: Site) -> None:
    first, second = await nodes(memory_site)
    name = await speaks(first)
    await first.node.update_session(name, None, None, None, None, standbys=1)
    follower = await follows(memory_site, second)
    stream = listen(memory_site, name, 60)
    await until(lambda: len(stream.tokens) > 3)
    live = follower.live
    await move(first, name, second)
    assert owner_of(memory_site, name)[1] is live and second.node.counters.restores == 1
    assert (await stream.done()).tokens == continuation(PROMPT, 60, GREEDY)[0]
    await follows(memory_site, first)
    await second.node.update_session(name, None, None, None, None, standbys=0)
    await ends_well(memory_site, name, expected(PROMPT, 60), second)


async def test_a_follower_reads_the_store_while_its_owner_tells_nothing(memory_site: Site) -> None:
    first, second = await nodes(memory_site)
    name = await speaks(first)
    epoch = owner_of(memory_site, name)[1].epoch
    ask = FollowAsk(name, epoch, first.node.incarnation, "nowhere:1", "m")
    reports = second.node.follow(ask)
    told = await anext(reports)
    assert told.known == len(PROMPT)
    await first.append(name, b"more")
    while told.applied < len(PROMPT) + 4:
        told = await anext(reports)
    await reports.aclose()
    await ends_well(memory_site, name, [*PROMPT, *b"more"], first)


async def test_only_the_owner_may_ask_and_only_where_there_is_room(memory_site: Site) -> None:
    first, second = await nodes(memory_site, slots=1)
    name = await speaks(first)
    epoch = owner_of(memory_site, name)[1].epoch
    good = FollowAsk(name, epoch, first.node.incarnation, first.options.address)
    for ask in (replace(good, epoch=epoch + 1), replace(good, owner="i-somebody")):
        with pytest.raises(StaleEpochError):
            await anext(second.node.follow(ask))
    with pytest.raises(StaleEpochError):
        await anext(first.node.follow(good))
    idle = await speaks(second, name="idle")
    await second.idle(idle)
    with pytest.raises(NodeCapacityError):
        await anext(second.node.follow(good))
    assert owner_of(memory_site, idle)[1].place is Place.RESIDENT, "a standby makes nobody park"


async def test_a_follower_that_nobody_asks_for_lingers_and_goes(memory_site: Site) -> None:
    """Its owner may be dead: then this node takes the session. If not, its slot is free again."""
    first, second = await nodes(memory_site)
    name = await speaks(first)
    epoch = owner_of(memory_site, name)[1].epoch
    reports = second.node.follow(FollowAsk(name, epoch, first.node.incarnation, first.options.address))
    await anext(reports)
    await reports.aclose()
    assert len(followers(memory_site)) == 1
    again = second.node.follow(FollowAsk(name, epoch, first.node.incarnation, first.options.address))
    await anext(again)
    assert second.node.counters.restores == 1, "it was there still"
    await again.aclose()
    await ends_well(memory_site, name, PROMPT, first)


async def test_a_follower_that_is_not_exact_is_none(memory_site: Site) -> None:
    """State of other numerics would change what an exact session says: its log is replayed from the start instead."""
    (first,) = await nodes(memory_site, 1)
    name = await speaks(first)
    await first.node.create_checkpoint(name, "c", None)
    options = replace(first.options, replay_limit_tokens=1)
    second = await memory_site.node(HashEngine(numerics_id="hash-2"), options=options)
    epoch = owner_of(memory_site, name)[1].epoch
    reports = second.node.follow(FollowAsk(name, epoch, first.node.incarnation, first.options.address, "m"))
    told = await anext(reports)
    assert (told.restored_tokens, told.known) == (0, len(PROMPT)), "its own restore would have taken the checkpoint"
    await reports.aclose()
    await ends_well(memory_site, name, PROMPT, first)
    assert (await second.catalog.get_session(name)).numerics_ids == ("hash-1",), "a follower writes nothing"


async def test_a_standby_that_is_given_up_while_it_begins_anew_leaves_nothing(memory_site: Site) -> None:
    first, second = await nodes(memory_site)
    name = await speaks(first)
    await first.node.update_session(name, None, None, None, None, standbys=1)
    follower = await follows(memory_site, second)
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def keep(method: str, done: bool) -> None:
        if done and method == "get_session" and follower.turn.locked():
            asked.set()
            await go_on.wait()

    second.faults.watch = keep
    await first.node.rewind(name, 20, None)
    async with asyncio.timeout(10):
        await asked.wait()  # it knows that the log is another one, and asks what it is now
    await second.node._core.unfollow(follower, UnavailableError("a step of it failed"))
    second.faults.watch = None
    go_on.set()
    await first.node.update_session(name, None, None, None, None, standbys=0)
    await until(lambda: not follower.turn.locked() and not second.node._core.follows)
    await until(lambda: not second.node._followers._restores)
    assert second.engine.sequences == {}
