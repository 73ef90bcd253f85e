"""Where a session goes that nobody owns."""

import asyncio
import contextvars
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from forkpoint.errors import SessionRelocatingError
from forkpoint.server.session.placement import Candidate, NodeState
from forkpoint.server.session.whereabouts import Whereabouts, free_call
from forkpoint.statestore.records import NodeRow, NodeStatus, SessionRow
from tests.support.hash_engine import HashEngine
from tests.support.session_site import Site


class Members:
    """Nodes as the test says: sessions in ten slots, and numerics, by incarnation."""

    def __init__(self, **nodes: tuple[int, str]) -> None:
        self.nodes = tuple(
            NodeRow(name, f"node-{name}", f"{name}:1", numerics) for name, (_, numerics) in nodes.items()
        )
        self.load = {name: count for name, (count, _) in nodes.items()}
        self.placed: list[str] = []

    def candidates(self) -> list[Candidate]:
        return [
            Candidate(
                node.incarnation,
                node.numerics_id,
                NodeState.SERVING,
                NodeStatus(slots_total=10, sessions=self.load[node.incarnation]),
            )
            for node in self.nodes
        ]

    def note_placed(self, incarnation: str) -> None:
        self.placed.append(incarnation)


async def row_and_core(site: Site, numerics: tuple[str, ...] = ()) -> tuple[SessionRow, Any]:
    """A session that nobody owns, and the node that is asked for it."""
    node = await site.node(HashEngine())
    await node.workflow()
    name = await node.session("s")
    row = await node.node._core.catalog.get_session(name)
    return replace(row, numerics_ids=numerics), node.node._core


async def where(core: Any, row: SessionRow, members: Members, without: set[str] | None = None) -> str:
    """Where a free call is sent; "": nowhere."""

    async def ask() -> str:
        free_call().without.update(without or ())
        with suppress(SessionRelocatingError):
            await Whereabouts(core, members).place(row)  # type: ignore[arg-type]
            return ""
        return members.placed[-1]

    return await asyncio.create_task(ask())  # owner: this call


async def test_the_node_that_is_asked_serves_unless_another_is_clearly_better(site: Site) -> None:
    row, core = await row_and_core(site)
    own = core.incarnation
    assert await where(core, row, Members(**{own: (2, "hash-1")})) == ""
    assert await where(core, row, Members(**{own: (2, "hash-1")}, other=(0, "hash-1"))) == ""
    assert await where(core, row, Members(**{own: (8, "hash-1")}, other=(0, "hash-1"))) == "other"


async def test_a_node_that_did_not_answer_the_call_is_not_chosen_again(site: Site) -> None:
    row, core = await row_and_core(site)
    members = Members(**{core.incarnation: (9, "hash-1")}, one=(0, "hash-1"), two=(1, "hash-1"))
    assert await where(core, row, members) == "one"
    assert await where(core, row, members, {"one:1"}) == "two"
    assert await where(core, row, members, {"one:1", "two:1"}) == ""


async def test_a_session_goes_where_its_bits_are_computed(site: Site) -> None:
    row, core = await row_and_core(site, ("hash-2",))
    members = Members(**{core.incarnation: (0, "hash-1")}, other=(5, "hash-2"))
    assert await where(core, row, members) == "other"
    nowhere = Members(**{core.incarnation: (0, "hash-1")}, other=(5, "hash-3"))
    assert await where(core, row, nowhere) == "", "no node computes them: it is served all the same"


async def test_what_no_caller_waits_for_stays_here(site: Site) -> None:
    row, core = await row_and_core(site)
    members = Members(**{core.incarnation: (9, "hash-1")}, other=(0, "hash-1"))
    with pytest.raises(SessionRelocatingError):
        free_call()
        await Whereabouts(core, members).place(row)  # type: ignore[arg-type]

    async def recover() -> None:
        await Whereabouts(core, members).place(row)  # type: ignore[arg-type]

    await asyncio.get_running_loop().create_task(recover(), context=contextvars.Context())  # owner: this test
