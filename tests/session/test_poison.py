"""A session whose numbers leave the finite range: it is restored, then quarantined; nobody else notices."""

import asyncio
import contextlib
from collections.abc import Sequence

import apsw
import pytest

from forkpoint.errors import ForkpointError, LogCorruptError, SessionQuarantinedError
from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample, Sampled, Work
from forkpoint.server.engine.errors import NonFiniteLogitsError
from forkpoint.server.session.api import GenerateCall
from forkpoint.statestore.records import SessionState
from tests.support.hash_engine import HashEngine, continuation
from tests.support.session_site import Running, Site, key, until

PROMPT = list(b"one bad apple, says the proverb, and the rest")
POISON = 255
GREEDY = Sample(0.0, 0, 1.0, 0.0, 7)


class PoisonEngine(HashEngine):
    """Fails every step that consumes POISON; `spoilt` sequences fail whatever they do."""

    def __init__(self) -> None:
        super().__init__()
        self.spoilt: set[int] = set()
        self.refused = 0

    def step(self, works: Sequence[Work]) -> list[Sampled | None]:
        for work in works:
            if work.sequence in self.spoilt or POISON in work.token_ids:
                self.refused += 1
                raise NonFiniteLogitsError(work.sequence, work.start)
        return super().step(works)


async def poisoned(site: Site) -> tuple[Running, PoisonEngine]:
    engine = PoisonEngine()
    node = await site.node(engine)
    await node.workflow()
    return node, engine


async def test_a_session_that_fails_every_step_is_quarantined_and_the_others_do_not_notice(site: Site) -> None:
    node, engine = await poisoned(site)
    engine.step_pause = 0.001
    others = [await node.session(f"other{number}") for number in range(3)]
    for name in others:
        await node.append(name, PROMPT)
    readers = [node.reading(GenerateCall(name, key(f"g{name.session}"), max_tokens=150)) for name in others]
    await until(lambda: all(len(read.tokens) > 3 for read, _ in readers))
    bad = await node.session("bad")
    await node.append(bad, [*PROMPT, POISON])
    with pytest.raises(SessionQuarantinedError) as caught:
        await node.generate(GenerateCall(bad, key("g"), max_tokens=5))
    assert "not finite" in caught.value.cause
    await asyncio.gather(*(task for _, task in readers))
    for read, _ in readers:
        assert read.tokens == continuation(PROMPT, 150, GREEDY)[0]
    row = await node.catalog.get_session(bad)
    assert (row.state, row.owner, row.state_reason) == (SessionState.QUARANTINED, "", caught.value.cause)
    assert await node.log(bad) == [*PROMPT, POISON], "the evidence is kept"
    refused = engine.refused
    with pytest.raises(SessionQuarantinedError):
        await node.generate(GenerateCall(bad, key("g"), max_tokens=5))
    with pytest.raises(SessionQuarantinedError):
        await node.append(bad, b"x")
    assert engine.refused == refused, "nobody tries again"
    assert node.node.counters.sessions_quarantined == 1
    child = (await node.fork(bad, "rescued", position=len(PROMPT)))[0]
    read = await node.generate(GenerateCall(child, key("h"), max_tokens=9))
    assert read.tokens == continuation(PROMPT, 9, GREEDY)[0], "what came before the bad token can be forked"


async def test_a_quarantined_generation_is_not_taken_by_another_node(site: Site) -> None:
    node, _ = await poisoned(site)
    bad = await node.session("bad")
    await node.append(bad, [*PROMPT, POISON])
    with pytest.raises(SessionQuarantinedError):
        await node.generate(GenerateCall(bad, key("g"), max_tokens=5))
    second = await site.node()
    await node.crash()
    await asyncio.sleep(0.1)
    assert second.node.counters.recovered_generations == 0
    with pytest.raises(SessionQuarantinedError):
        await second.generate(GenerateCall(bad, key("g"), max_tokens=5))
    deleted = await second.node.delete_session(bad, None)
    assert deleted.state == "DELETED", "it can still be deleted"


async def test_a_state_that_went_bad_is_restored_and_its_stream_goes_on(site: Site) -> None:
    node, engine = await poisoned(site)
    engine.step_pause = 0.001
    name = await node.session("s")
    await node.append(name, PROMPT)
    read, task = node.reading(GenerateCall(name, key("g"), max_tokens=120))
    for _ in range(3):
        mark = len(read.tokens) + 10
        await until(lambda mark=mark: len(read.tokens) > mark)  # type: ignore[misc]
        engine.spoilt = set(engine.sequences)
        refused = engine.refused
        await until(lambda refused=refused: engine.refused > refused)  # type: ignore[misc]
    await task
    assert read.tokens == continuation(PROMPT, 120, GREEDY)[0]
    assert node.node.counters.restores >= 3


async def test_a_session_whose_log_is_damaged_is_quarantined_after_three_restores(disk: Site) -> None:
    node = await disk.node()
    await node.workflow()
    name = await node.session("s")
    other = await node.session("other")
    await node.append(name, PROMPT)
    await node.idle(name)
    await node.node.pause(name, None)
    damage_log(disk, name)
    caught: list[Exception] = []
    for _ in range(40):
        try:
            await node.node.resume(name, None)
        except ForkpointError as error:
            caught.append(error)
            if isinstance(error, SessionQuarantinedError):
                break
    assert isinstance(caught[0], LogCorruptError), "first the caller hears what is wrong"
    assert isinstance(caught[-1], SessionQuarantinedError)
    assert "damaged" in caught[-1].cause
    await node.append(other, PROMPT)
    assert (await node.generate(GenerateCall(other, key("o"), max_tokens=3))).finished is not None


def damage_log(site: Site, name: SessionName) -> None:
    """Flip a bit in the session's only record."""
    with contextlib.closing(apsw.Connection(str(site.folder / "catalog.db"))) as database:
        database.set_busy_timeout(10_000)  # the node renews its lease meanwhile
        (record,) = database.execute("SELECT record FROM log").fetchone() or (b"",)
        damaged = bytes([*record[:-9], record[-9] ^ 1, *record[-8:]])
        database.execute("UPDATE log SET record = ?", (damaged,))
