"""Moves and standbys over real gRPC: three nodes, clients at any of them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from forkpoint.client.session import Session
from forkpoint.proto.forkpoint.v1 import admin_pb2 as pb
from tests.support.hash_engine import HashEngine, continuation
from tests.support.moving import GREEDY
from tests.support.rpc_nodes import Nodes, nodes
from tests.support.rpc_site import Refusal, Served, settled
from tests.support.session_site import background

TEXT = "a session that is at home wherever its tokens are known, and nowhere for long"
PROMPT = list(TEXT.encode())


def slow() -> HashEngine:
    """So slow that something can happen while it generates."""
    engine = HashEngine()
    engine.step_pause = 0.002
    return engine


@pytest.fixture
async def three(tmp_path: Path) -> AsyncIterator[Nodes]:
    async with nodes(tmp_path, "abc", slow) as running:
        yield running


async def read(session: Session, count: int, tokens: list[int]) -> None:
    """A generation as the client library reads it."""
    async for chunk in session.generate(max_tokens=count):
        tokens += chunk.token_ids


async def move(at: Served, session: Session, target: str = "") -> list[pb.MigrateProgress]:
    """Ask a node to move a session."""
    request = pb.MigrateSessionRequest(name=session.name, target_node=target)
    return [event async for event in at.raw.admin.MigrateSession(request)]


def owner(running: Nodes, session: Session) -> str:
    """Which node has it."""
    found = [
        name
        for name, served in running.by_name.items()
        if any(str(live) == session.name for live in served.running.node._core.lives)
    ]
    assert len(found) == 1
    return found[0]


async def reached(tokens: list[int], count: int) -> None:
    async with asyncio.timeout(20):
        while len(tokens) < count:
            await asyncio.sleep(0.005)


async def test_a_session_moves_under_its_readers_whoever_is_asked(three: Nodes) -> None:
    """The call comes to a node that has nothing to do with it, and so does the reader."""
    a, c = three.by_name["a"], three.by_name["c"]
    session = await a.session("s", TEXT)
    there = c.client.sessions.open(session.name)
    tokens: list[int] = []
    reading = background(read(there, 300, tokens))
    await reached(tokens, 5)
    source = owner(three, session)
    target = next(name for name in "ab" if name != source)
    events = await move(c, session, f"nodes/{target}")
    assert events[0].phase == pb.MigrateProgress.RESTORING and events[-1].phase == pb.MigrateProgress.MOVED
    last = events[-1]
    assert last.target_node == last.session.node == f"nodes/{target}"
    assert last.pause.ToMicroseconds() > 0 and last.session.epoch == 2
    assert owner(three, session) == target and len(tokens) < 300
    await asyncio.wait_for(reading, 30)
    assert tokens == continuation(PROMPT, 300, GREEDY)[0]
    (again,) = await move(a, session, f"nodes/{target}")
    assert again.phase == pb.MigrateProgress.MOVED and again.session.epoch == 2


async def test_a_standby_goes_on_when_its_owner_dies(three: Nodes) -> None:
    a = three.by_name["a"]
    session = await a.session("s", TEXT)
    home = owner(three, session)
    reader = three.by_name[next(name for name in "abc" if name != home)]
    updated = reader.client.sessions.open(session.name)
    await updated.update(standbys=1)
    tokens: list[int] = []
    reading = background(read(updated, 300, tokens))

    def standby() -> str:
        for name, served in three.by_name.items():
            if any(follower.ready for follower in served.running.node._core.follows.values()):
                return name
        return ""

    async with asyncio.timeout(20):
        while not standby():
            await asyncio.sleep(0.01)
    ready = standby()
    await reached(tokens, 10)
    assert owner(three, session) == home and ready != home
    await three.vanish(home)
    await asyncio.wait_for(reading, 40)
    assert tokens == continuation(PROMPT, 300, GREEDY)[0]
    assert owner(three, session) == ready
    assert three.by_name[ready].running.node.counters.restores == 1, "nothing was restored to go on"


async def test_what_can_not_move_is_refused_with_the_cause(three: Nodes) -> None:
    a = three.by_name["a"]
    session = await a.session("s", TEXT)
    async with Refusal(grpc.StatusCode.NOT_FOUND, "NOT_FOUND"):
        await move(a, session, "nodes/z")
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
        await move(a, session, "b")
    target = three.by_name[next(name for name in "abc" if name != owner(three, session))]
    target.running.node._core.cordoned = True
    async with Refusal(grpc.StatusCode.FAILED_PRECONDITION, "MOVE_FAILED") as refusal:
        await move(a, session, f"nodes/{target.running.node._core.options.node}")
    assert refusal.info.metadata["session"] == session.name and "drain" in refusal.info.metadata["cause"].lower()
    target.running.node._core.cordoned = False
    await session.pause()
    async with Refusal(grpc.StatusCode.FAILED_PRECONDITION, "SESSION_PAUSED"):
        await move(a, session, "nodes/b")


async def test_cancelling_the_call_cancels_the_move(three: Nodes) -> None:
    a = three.by_name["a"]
    session = await a.session("s", TEXT)
    home = owner(three, session)
    target = next(name for name in "abc" if name != home)
    three.by_name[target].engine.step_pause = 0.3
    request = pb.MigrateSessionRequest(name=session.name, target_node=f"nodes/{target}")
    call = three.by_name[home].raw.admin.MigrateSession(request)
    async for event in call:
        assert event.phase == pb.MigrateProgress.RESTORING
        break
    call.cancel()
    await settled(session)
    row = await three.by_name[home].running.catalog.get_session(
        next(iter(three.by_name[home].running.node._core.lives))
    )
    assert (owner(three, session), row.migration, row.epoch) == (home, "", 1)
