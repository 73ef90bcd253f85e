"""A short run of everything, and proof that its checks can fail. Longer ones: `python -m tests.chaos`."""

import sqlite3
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from forkpoint.client.client import Client
from forkpoint.statestore.logrecord import LogRecord, encode_record
from forkpoint.statestore.records import Kind
from tests.chaos.chatter import Story, open_workflow, plan
from tests.chaos.moving import VICTIMS, cases, diagonal, play_beside
from tests.chaos.nemesis import SUDDEN, deeds, killers
from tests.chaos.quiet import Judge
from tests.chaos.records import records_in, stale_records
from tests.chaos.run import play
from tests.chaos.server import leaked
from tests.chaos.verdict import Settings, unexpected
from tests.support.hash_engine import HashEngine
from tests.support.rpc_site import served

SHORT = Settings(seed=20261130, seconds=5, sessions=50, tokens=24, step_pause_ms=10)


@pytest.mark.parametrize("seconds", [5, 60])
async def test_three_nodes_over_redis_keep_every_promise_whatever_goes_wrong(tmp_path: Path, seconds: int) -> None:
    settings = replace(SHORT, seconds=seconds)
    verdict = await play(settings, tmp_path, print)
    assert verdict.sound, verdict.line(settings)
    assert verdict.counts["sessions"] >= 50, verdict.counts
    assert verdict.deeds.get("kill", 0) > 0 and verdict.counts["streams opened again"] > 0, verdict.deeds


async def test_a_move_may_lose_anybody_at_every_step(tmp_path: Path) -> None:
    """Every step with one victim; `python -m tests.chaos.moving` has every step with every victim."""
    chosen = diagonal()
    assert {(case.side, case.step) for case in chosen} == {(case.side, case.step) for case in cases()}
    assert {case.victim for case in chosen} == set(VICTIMS) and len(chosen) * len(VICTIMS) == len(cases())
    assert await play_beside(chosen, tmp_path, sites=2) == []


async def test_what_a_client_was_shown_and_the_log_lacks_is_found(tmp_path: Path) -> None:
    """The judge, on a server whose model is another one, and with a token shown that never was."""
    other = HashEngine(alphabet=tuple(range(65, 91)))
    async with (
        served(tmp_path / "disturbed", engine=other, workflow=False) as disturbed,
        served(tmp_path / "quiet", workflow=False) as quiet,
    ):
        for client in (disturbed.client, quiet.client):
            await open_workflow(client)
        assert await judged(disturbed.client, disturbed.client) == ([], [])
        lost, divergent = await judged(disturbed.client, quiet.client)
        assert lost == [] and len(divergent) == len(set(divergent)) > 0
        lost, _ = await judged(disturbed.client, disturbed.client, spoil=True)
        assert len(lost) == 1 and "were shown" in lost[0]


async def judged(disturbed: Client, quiet: Client, spoil: bool = False) -> tuple[list[str], list[str]]:
    """What a judge finds about one story; `spoil`: its client believes that it saw one token more."""
    story = Story(seed=1, number=3, tokens=8)
    await story.tell(disturbed)
    if spoil:
        story.family[0].seen[max(story.family[0].seen) + 1000] = 97
    judge = Judge(disturbed, quiet, workers=1)
    judge.submit(story)
    judge.finish()
    await judge.run()
    assert judge.counts["sessions"] == len(story.family) and judge.counts["tokens"] > 0
    return judge.lost, judge.divergent


def record(branch: int, start: int, epoch: int) -> LogRecord:
    return LogRecord(branch, start, epoch, Kind.GENERATED, bytes(32), bytes(4))


def test_a_record_under_an_older_epoch_than_one_before_it_is_found(tmp_path: Path) -> None:
    sound = [record(1, 0, 1), record(1, 1, 2), record(2, 5, 1), record(2, 6, 1)]
    assert stale_records(sound) == []
    assert stale_records([*sound, record(1, 2, 1)]) == ["branch 1: epoch 1 at 2 behind epoch 2"]
    path = tmp_path / "catalog.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE log (branch INTEGER, start INTEGER, record BLOB)")
        rows = [(one.branch, one.start, encode_record(one)) for one in sound]
        database.executemany("INSERT INTO log VALUES (?, ?, ?)", rows)
    database.close()
    assert list(records_in(f"sqlite://{path}")) == sound


def test_a_sequence_that_a_stopped_node_still_holds_is_a_leak() -> None:
    engine = HashEngine()
    assert leaked(engine) == []
    engine.create()
    assert leaked(engine) == ["sequences [1] are left"]


def test_an_exception_in_a_servers_log_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        '{"event": "serving"}\n{"logger": "a", "message": "m", "level": "warning"}\n'
        '{"logger": "b", "error": "KeyError", "frames": ["/x/y.py:7 f"]}\nTraceback (most recent call last):\n'
    )
    assert Counter(unexpected([log, log])) == Counter(
        ["2 times b: KeyError at y.py:7 f", "2 times a traceback outside the log"]
    )


def test_a_seed_decides_what_goes_wrong_and_what_sessions_say() -> None:
    once, again = (list(islice(deeds(7, SUDDEN, 3), 200)) for _ in range(2))
    assert once == again != list(islice(deeds(8, SUDDEN, 3), 200))
    assert {evil.kind for evil in once} == set(SUDDEN.kinds) and {evil.node for evil in once} == {0, 1, 2}
    assert all(evil.node != evil.other for evil in once)
    assert len({lane.name for lane in killers(3)}) == 3
    assert plan(7, 5, 60) == plan(7, 5, 60) != plan(7, 6, 60)
    assert any(turn.children for number in range(20) for turn in plan(7, number, 60))
    assert replace(SHORT, evils="kills").lanes == killers(1)
