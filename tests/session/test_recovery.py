"""A node dies: the others divide what it left, each session is taken once, and the one that kills is found."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from forkpoint.errors import (
    ForkpointError,
    SessionQuarantinedError,
    SessionRelocatingError,
    StoreUnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.move_errors import NodeStalledError
from forkpoint.server.engine.batch import Sample, Sampled, Work
from forkpoint.server.session.api import GenerateCall
from forkpoint.server.session.placement import NodeState
from forkpoint.statestore.records import NodeRow, SessionState
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import FAST, PATIENCE_SECONDS, Read, Running, Site, background, key, until

PROMPT = list(b"what was begun is finished")
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)
POISON = 255
SURE = replace(FAST, lease_ttl_seconds=5.0)
"""Locks tell of deaths; nobody is taken for dead because the machine is busy."""


class MortalEngine(HashEngine):
    """Consuming POISON ends the process: nothing happens any more, until the test has buried it. `gate`: steps wait for
    it."""

    def __init__(self, slots: int = 16, mortal: bool = True) -> None:
        super().__init__(slots)
        self.mortal = mortal
        self.died = False
        self.gate = threading.Event()
        self.gate.set()
        self._buried = threading.Event()

    def step(self, works: Sequence[Work]) -> list[Sampled | None]:
        if self.mortal and any(POISON in work.token_ids for work in works):
            self.died = True
            self._buried.wait(20)
            raise RuntimeError("it is dead")
        self.gate.wait(20)
        return super().step(works)

    def bury(self) -> None:
        self._buried.set()
        self.gate.set()


async def begun(node: Running, number: int, tokens: int = 40) -> list[SessionName]:
    """Sessions with a generation of which the first tokens are there."""
    names = [await node.session(f"s{index}") for index in range(number)]
    reads: list[Read] = []
    for name in names:
        await node.append(name, PROMPT)
        read, task = node.reading(GenerateCall(name, key(f"g-{name.session}"), max_tokens=tokens))
        task.add_done_callback(lambda done: done.exception())
        reads.append(read)
    await until(lambda: all(read.tokens for read in reads))
    return names


async def finished(node: Running, names: Sequence[SessionName], tokens: int = 40) -> None:
    """All generations are at their end, and are what they would have been."""
    async with asyncio.timeout(20):
        while {row.name for row in await node.catalog.list_open_generations()} & set(names):
            await asyncio.sleep(0.01)
    for name in names:
        assert await node.log(name) == PROMPT + continuation(PROMPT, tokens, GREEDY)[0]


async def test_the_sessions_of_a_dead_node_are_divided_and_each_is_taken_once(site: Site) -> None:
    first = await site.node(HashEngine(slots=16), options=SURE)
    first.engine.step_pause = 0.003
    await first.workflow()
    others = [await site.node(HashEngine(slots=16), options=SURE) for _ in range(2)]
    names = await begun(first, 12, tokens=100)
    epochs = {name: (await first.catalog.get_session(name)).epoch for name in names}
    await first.crash()
    await finished(others[0], names, tokens=100)
    taken = [node.node.counters.recovered_generations for node in others]
    assert sum(taken) == 12 and min(taken) > 0
    for name in names:
        row = await others[0].catalog.get_session(name)
        assert (row.epoch, row.takeovers) == (epochs[name] + 1, 1), "nobody took it from the one that took it"


async def test_a_session_that_its_first_heir_does_not_take_goes_to_the_next(site: Site) -> None:
    first = await site.node(options=SURE)
    first.engine.step_pause = 0.003
    await first.workflow()
    unable, able = await site.node(options=SURE), await site.node(options=SURE)
    names = await begun(first, 6)
    unable.faults.before["acquire"] = StoreUnavailableError("catalog", "not for you")
    await first.crash()
    await finished(able, names)
    assert able.node.counters.recovered_generations == 6
    assert unable.node.counters.recovered_generations == 0


async def test_what_was_used_last_is_taken_first(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = MortalEngine()
    first = await site.node(engine, options=SURE)
    await first.workflow()
    names = await begun(first, 5, tokens=500)
    engine.gate.clear()
    await asyncio.sleep(0.05)
    order = [row.name for row in await first.catalog.list_open_generations()]
    assert set(order) == set(names)
    second = await site.node(options=SURE)
    taken: list[SessionName] = []
    acquire = second.node._core.catalog.acquire

    async def noted(name: SessionName, *rest: object) -> object:
        taken.append(name)
        return await acquire(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(second.faults, "acquire", noted, raising=False)
    await first.crash()
    engine.bury()
    await until(lambda: len(taken) == 5)
    assert taken == order


async def test_idle_sessions_of_a_dead_node_wait_for_a_touch(site: Site) -> None:
    first = await site.node()
    await first.workflow()
    name = await first.session("idle")
    await first.append(name, PROMPT)
    second = await site.node()
    await first.crash()
    async with asyncio.timeout(5):
        while len(await second.node.list_nodes()) > 1:
            await asyncio.sleep(0.01)
    row = await second.catalog.get_session(name)
    assert row.owner != second.node.incarnation and row.epoch == 1
    await second.append(name, b"x")
    assert (await second.catalog.get_session(name)).epoch == 2


async def test_a_session_that_three_nodes_died_of_is_quarantined_and_its_neighbours_live_on(site: Site) -> None:
    nodes = [await site.node(engine := MortalEngine(), options=SURE)]
    engine.step_pause = 0.002
    await nodes[0].workflow()
    names = await begun(nodes[0], 5, tokens=150)
    bad = await nodes[0].session("bad")
    await nodes[0].append(bad, [*PROMPT, POISON])
    _, task = nodes[0].reading(GenerateCall(bad, key("g-bad"), max_tokens=9))
    task.add_done_callback(lambda done: done.exception())
    for _ in range(3):
        victim = nodes[-1]
        assert isinstance(victim.engine, MortalEngine)
        mortal = victim.engine
        await until(lambda mortal=mortal: mortal.died)  # type: ignore[misc]
        nodes.append(await site.node(heir := MortalEngine(), options=SURE))
        heir.step_pause = 0.002
        await victim.crash()
        mortal.bury()
    last = nodes[-1]
    await until(lambda: last.node.counters.sessions_quarantined == 1)
    row = await last.catalog.get_session(bad)
    assert (row.state, row.owner, row.head) == (SessionState.QUARANTINED, "", len(PROMPT) + 1)
    assert row.state_reason == f"3 owners in a row were lost that had it, and none wrote a token behind {row.head}"
    with pytest.raises(SessionQuarantinedError):
        await last.generate(GenerateCall(bad, key("g-bad"), max_tokens=9))
    await finished(last, names, tokens=150)
    assert isinstance(last.engine, MortalEngine) and not last.engine.died

    last.engine.mortal = False  # what was wrong is mended
    view = await last.node.release_quarantine(bad, None)
    assert (view.row.state, view.row.state_reason, view.row.takeovers) == (SessionState.ACTIVE, "", 0)
    await until(lambda: last.node.counters.generations_finished > len(names))
    assert await last.log(bad) == [*PROMPT, POISON, *continuation([*PROMPT, POISON], 9, GREEDY)[0]]


@pytest.mark.parametrize("forgotten", [False, True])
async def test_a_node_whose_processes_end_one_after_the_other_puts_no_session_away(site: Site, forgotten: bool) -> None:
    """Its own fault, not its sessions': they go on once a process of it lives. `forgotten`: the process that had the
    session was taken off the list of nodes before anybody took the session."""
    node = await site.node(engine := MortalEngine(), options=SURE, name="alone")
    await node.workflow()
    bad = await node.session("bad")
    await node.append(bad, [*PROMPT, POISON])
    _, task = node.reading(GenerateCall(bad, key("g-bad"), max_tokens=9))
    task.add_done_callback(lambda done: done.exception())
    for _ in range(4):
        await until(lambda mortal=engine: mortal.died)  # type: ignore[misc]
        heir = MortalEngine()
        if forgotten:
            await node.catalog.remove_node(node.node.incarnation)
        await node.crash()
        node = await site.node(heir, options=SURE, name="alone")
        engine.bury()
        engine = heir
    await until(lambda: node.node.counters.restores > 0 or engine.died)
    assert (await node.catalog.get_session(bad)).state is SessionState.ACTIVE
    assert node.node.counters.sessions_quarantined == 0
    await node.crash()
    last = await site.node(options=SURE, name="alone")
    engine.bury()
    await until(lambda: last.node.counters.generations_finished == 1)
    assert await last.log(bad) == [*PROMPT, POISON, *continuation([*PROMPT, POISON], 9, GREEDY)[0]]


async def test_of_sessions_that_lost_an_owner_without_progress_one_at_a_time_is_tried(site: Site) -> None:
    """Two owners die before any session got on; at the third, the second session waits until the first has a token."""
    engines = [MortalEngine() for _ in range(3)]
    first = await site.node(engines[0], options=SURE)
    await first.workflow()
    names = await begun(first, 4, tokens=200)
    for engine in engines:
        engine.gate.clear()
    second = await site.node(engines[1], options=SURE)
    await first.crash()
    engines[0].bury()
    async with asyncio.timeout(PATIENCE_SECONDS):
        # A session that is not the second's when that dies has lost one owner only.
        while {(await second.catalog.get_session(name)).owner for name in names} != {second.node.incarnation}:
            await asyncio.sleep(0.005)
    third = await site.node(engines[2], options=SURE)
    await second.crash()
    engines[1].bury()
    await until(lambda: len(third.node._core.lives) == 1)
    await asyncio.sleep(0.2)
    (live,) = third.node._core.lives.values()
    assert live.runs_alone and live.row.takeovers == 2
    owned = [row for name in names if (row := await third.catalog.get_session(name)).owner == third.node.incarnation]
    assert [row.name for row in owned] == [live.name], "the others can't be blamed for what this one does"
    touched = background(third.node.cancel_generation(next(name for name in names if name != live.name)))
    await asyncio.sleep(0.05)
    assert not touched.done(), "also those that somebody asks for"
    engines[2].gate.set()
    await touched
    core = third.node._core
    await until(lambda: core.counters.recovered_generations >= 3)
    await until(lambda: not any(live.runs_alone for live in core.lives.values()))


async def test_a_session_that_gets_on_between_deaths_is_never_suspected(site: Site) -> None:
    node = await site.node(options=SURE)
    node.engine.step_pause = 0.003
    await node.workflow()
    names = await begun(node, 1, tokens=200)
    for _ in range(5):
        heir = await site.node(options=SURE)
        heir.engine.step_pause = 0.003
        head = (await heir.catalog.get_session(names[0])).head
        await node.crash()
        async with asyncio.timeout(10):
            while (await heir.catalog.get_session(names[0])).head <= head + 2:
                await asyncio.sleep(0.005)
        node = heir
        assert (await node.catalog.get_session(names[0])).takeovers == 1
    await finished(node, names, tokens=200)


async def test_of_many_first_touches_at_several_nodes_one_takes_each_session(site: Site) -> None:
    sessions = 1000 if site.backend == "memory" else 100
    nodes = [await site.node(options=replace(SURE, sweep_seconds=60.0)) for _ in range(4)]
    await nodes[0].workflow()
    names = [await nodes[0].session(f"s{number}") for number in range(sessions)]

    async def touch(node: Running, name: SessionName) -> bool:
        try:
            await node.node._recovery._owners.own(name)
        except SessionRelocatingError as error:
            assert error.address in {other.options.address for other in nodes if other is not node}
            return False
        return True

    async with asyncio.timeout(120):
        took = await asyncio.gather(*(touch(node, name) for name in names for node in nodes))
    assert sum(took) == sessions
    for name in names:
        row = await nodes[0].catalog.get_session(name)
        assert row.epoch == 1
        assert [node for node in nodes if name in node.node._core.lives] == [
            node for node in nodes if node.node.incarnation == row.owner
        ]


async def test_a_directory_that_is_out_of_date_takes_nothing_from_the_living_and_finds_the_dead(site: Site) -> None:
    stale = await site.node(options=replace(SURE, watch_seconds=60.0, recovery_look_seconds=60.0))
    await stale.workflow()
    name = await stale.session("s")
    newer = await site.node(options=SURE)
    await newer.append(name, PROMPT)
    with pytest.raises(SessionRelocatingError) as caught:
        await stale.append(name, b"x")
    assert caught.value.address == newer.options.address, "a node that came after its last look"
    await newer.crash()
    await stale.append(name, b"x")
    assert (await stale.catalog.get_session(name)).epoch == 2


async def test_a_node_whose_engine_hangs_gives_up_its_sessions_says_so_and_comes_back(site: Site) -> None:
    engine = MortalEngine()
    patient = replace(FAST, lease_ttl_seconds=1.5, stall_seconds=1.0)
    first = await site.node(engine, options=patient)
    await first.workflow()
    names = await begun(first, 3, tokens=300)
    second = await site.node(options=replace(patient, stall_seconds=0.0))
    engine.gate.clear()
    await until(lambda: first.node.stalled == "a step")
    for refused in (first.append(names[0], b"x"), first.append(await first.session("new"), b"x")):
        with pytest.raises(NodeStalledError):
            await refused
    await finished(second, names, tokens=300)
    assert second.node.counters.recovered_generations == 3
    assert await second.log(names[0]) == await first.log(names[0]), "it still reads"
    engine.gate.set()
    await until(lambda: first.node.stalled == "" and not first.node._core.lives)
    async with asyncio.timeout(10):
        while len(await second.node.list_nodes()) < 2:
            await asyncio.sleep(0.01)
    other = await first.session("other")
    await first.append(other, PROMPT)
    read = await first.generate(GenerateCall(other, key("other"), max_tokens=5))
    assert read.tokens == continuation(PROMPT, 5, GREEDY)[0]


async def test_a_store_that_takes_no_renewals_for_a_while_costs_nobody_a_session(site: Site) -> None:
    nodes = [await site.node(lock=False) for _ in range(2)]
    await nodes[0].workflow()
    names = [await node.session(f"s{number}") for number, node in enumerate(nodes)]
    for node, name in zip(nodes, names, strict=True):
        await node.append(name, PROMPT)
    gate = asyncio.Event()
    for node in nodes:
        node.faults.gates["renew_lease"] = gate
    for _ in range(30):
        await asyncio.sleep(0.03)
        for node, name in zip(nodes, reversed(names), strict=True):
            with pytest.raises(SessionRelocatingError):
                await node.append(name, b"x")
    gate.set()
    for node, name in zip(nodes, names, strict=True):
        await node.append(name, b"y")
        assert (await node.catalog.get_session(name)).epoch == 1
    assert [view.state for view in await nodes[0].node.list_nodes()] == [NodeState.SERVING, NodeState.SERVING]


async def test_release_of_a_session_that_is_not_quarantined_is_refused(node: Running) -> None:
    name = await node.session("s")
    with pytest.raises(ForkpointError, match="not quarantined"):
        await node.node.release_quarantine(name, None)


async def test_a_look_that_fails_at_once_is_not_made_again_at_once(
    memory: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a store that is broken: nothing else would get its turn any more."""
    looks = 0

    async def refuse() -> list[NodeRow]:
        nonlocal looks
        looks += 1
        if looks > 50:
            raise asyncio.CancelledError
        raise StoreUnavailableError("catalog", "it is broken")

    monkeypatch.setattr(memory.node._core.catalog, "list_nodes", refuse)
    memory.node._recovery.again()
    await until(lambda: looks > 0)
    await asyncio.sleep(0.01)
    assert looks < 50
