"""Which node a session goes to that nobody owns, and that it is one."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.server.session.placement import Candidate, NodeState
from forkpoint.statestore.records import NodeStatus
from tests.rpc.test_forwarding import at
from tests.support.hash_engine import HashEngine
from tests.support.rpc_nodes import DIRECTLY, Nodes, nodes
from tests.support.rpc_site import Served


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Nodes]:
    """Nodes a and b."""
    async with nodes(tmp_path) as running:
        yield running


@pytest.fixture
def a(pair: Nodes) -> Served:
    return pair.by_name["a"]


@pytest.fixture
def b(pair: Nodes) -> Served:
    return pair.by_name["b"]


async def test_the_first_touches_of_many_front_ends_make_one_owner_each(tmp_path: Path) -> None:
    async with nodes(tmp_path, "abc", lambda: HashEngine(slots=64)) as three:
        sites = list(three.by_name.values())
        names = [(await sites[0].client.sessions.create("w", f"s{n}")).name for n in range(16)]

        async def touch(site: Served, name: str) -> int:
            request = pb.ResumeRequest(name=name, request_id=f"{name}-{site.address}"[-60:])
            return (await site.raw.sessions.Resume(request)).session.epoch

        epochs = await asyncio.gather(*(touch(site, name) for name in names for site in sites * 2))
        assert set(epochs) == {1}
        owners = {
            name: {(await at(site, site.client.sessions.open(name)).get()).node for site in sites} for name in names
        }
        assert all(len(seen) == 1 for seen in owners.values())


def candidates(**load: int) -> list[Candidate]:
    """Nodes by incarnation, with so many sessions in ten slots."""
    return [
        Candidate(name, "hash-1", NodeState.SERVING, NodeStatus(slots_total=10, sessions=count))
        for name, count in load.items()
    ]


async def test_a_session_that_nobody_owns_goes_to_the_node_with_more_room(
    a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await a.client.sessions.create("w", "s")
    ids = {site.address: site.running.node.incarnation for site in (a, b)}
    busy = candidates(**{ids[a.address]: 1, ids[b.address]: 9})
    monkeypatch.setattr(b.running.node.members, "candidates", lambda: busy)
    assert (await at(b, session).append(text="x")).start == 0
    assert (await session.get()).node == "nodes/a"
    direct = (await a.client.sessions.create("w", "t")).name
    await b.raw.sessions.Append(pb.AppendRequest(name=direct, text_utf8=b"x"), metadata=DIRECTLY)
    assert (await a.client.sessions.open(direct).get()).node == "nodes/b", "who comes directly is served where it comes"


async def test_a_node_that_turns_a_new_session_down_is_not_asked_again(
    a: Served, b: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await a.client.sessions.create("w", "s")
    ids = {site.address: site.running.node.incarnation for site in (a, b)}
    busy = candidates(**{ids[a.address]: 1, ids[b.address]: 9})
    monkeypatch.setattr(b.running.node.members, "candidates", lambda: busy)
    await a.running.rpc.begin_drain()
    assert (await at(b, session).append(text="x")).start == 0
    assert (await b.client.sessions.open(session.name).get()).node == "nodes/b"


async def test_a_fork_is_first_served_where_its_parents_state_is(a: Served, b: Served) -> None:
    session = await a.session(text="hello")
    (child,) = await at(b, session).fork(session_ids=["child"])
    await at(b, child).generate(max_tokens=3).result()
    assert (await child.get()).node == "nodes/a"


async def test_a_node_that_is_to_take_nothing_new_sends_it_on(a: Served, b: Served) -> None:
    session = await a.client.sessions.create("w", "s")
    b.running.node._core.cordoned = True
    await b.running.node.members.refresh()
    assert (await at(b, session).append(text="x")).start == 0
    assert (await session.get()).node == "nodes/a"
