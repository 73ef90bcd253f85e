"""Nodes that share a catalog and nothing else: each keeps its blobs on its own disk, and fetches the others'."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forkpoint.ids import SessionName
from forkpoint.server.engine.batch import Sample
from forkpoint.statestore.check import Severity, check
from forkpoint.statestore.open import find_marker, open_blobs, open_catalog
from tests.support.hash_engine import HashEngine, continuation
from tests.support.rpc_site import Served, served, settled

GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)
TEXT = "state that lies on one disk alone. " * 10
NAME = "workflows/w/sessions/s"


def catalog(folder: Path) -> str:
    """What the nodes share."""
    return f"sqlite://{folder / 'catalog.sqlite'}"


@asynccontextmanager
async def node(folder: Path, name: str, workflow: bool = False) -> AsyncIterator[Served]:
    """A node with a blob folder of its own."""
    engine = HashEngine()
    async with served(folder / name, engine, workflow=workflow, node=name, catalog=catalog(folder)) as site:
        yield site


def stored(folder: Path, name: str) -> set[str]:
    """Blobs on a node's disk."""
    return {path.name for path in (folder / name / "blobs" / "blobs").rglob("*") if path.is_file()}


async def resumed_at(site: Served, session: str = NAME) -> tuple[int, int]:
    """Where a resume at this very node began, and what it replayed."""
    answer = await site.running.node.resume(SessionName.parse(session), None)
    return answer.restored_tokens, answer.replayed_tokens


async def errors(folder: Path, *names: str) -> list[str]:
    """What `forkpoint check` finds wrong with the store of these nodes."""
    marker = await find_marker(catalog(folder))
    assert marker is not None
    rows, blobs = open_catalog(catalog(folder)), open_blobs(" ".join(f"file://{folder / at / 'blobs'}" for at in names))
    await rows.open(marker)
    try:
        return [str(finding) async for finding in check(rows, blobs) if finding.severity is Severity.ERROR]
    finally:
        await rows.close()
        await blobs.close()


async def test_a_session_that_another_node_checkpointed_is_restored_from_there_and_kept(tmp_path: Path) -> None:
    async with asyncio.timeout(30), node(tmp_path, "a", workflow=True) as a, node(tmp_path, "b") as b:
        session = await a.session("s", TEXT)
        await settled(session)
        await session.pause()
        at = len(TEXT) // 16 * 16
        assert await resumed_at(b) == (at, len(TEXT) - at)
        fetched = b.parts.peer_blobs
        assert fetched is not None and fetched.fetched_blobs > 0 and fetched.refused_blobs == 0
        await b.client.sessions.open(NAME).pause()
        assert stored(tmp_path, "b") <= stored(tmp_path, "a"), "what was fetched was kept, and nothing made anew"
        assert await resumed_at(a) == (at, len(TEXT) - at)
    assert await errors(tmp_path, "a", "b") == []


async def test_what_only_a_dead_node_had_is_computed_again_from_the_log(tmp_path: Path) -> None:
    async with asyncio.timeout(30), node(tmp_path, "b", workflow=True) as b:
        async with node(tmp_path, "a") as a:
            session = await a.session("s", TEXT)
            generation = session.generate(max_tokens=40, request_id="g")
            assert (await generation.result()).token_ids == continuation(TEXT.encode(), 40, GREEDY)[0]
            assert stored(tmp_path, "a")
            await a.running.node.abandon()
        ours = b.client.sessions.open(NAME)
        log = TEXT.encode() + bytes(continuation(TEXT.encode(), 40, GREEDY)[0])
        assert await resumed_at(b) == (0, len(log)), "nobody has the blobs that the catalog names"
        again = await ours.generate(max_tokens=30).result()
        assert again.token_ids == continuation(log, 30, GREEDY)[0]
        assert stored(tmp_path, "b"), "what was computed again is checkpointed here"


async def test_a_generation_that_moves_takes_its_state_from_the_node_that_it_leaves(tmp_path: Path) -> None:
    async with asyncio.timeout(30), node(tmp_path, "a", workflow=True) as a, node(tmp_path, "b") as b:
        session = await a.session("s", TEXT)
        a.engine.step_pause = 0.01
        generation = session.generate(max_tokens=120)
        async for _ in generation:
            if len(generation.token_ids) >= 8:
                break
        async for _ in a.running.node.migrate(SessionName.parse(NAME), "b"):
            pass
        assert (await b.client.sessions.open(NAME).get()).node == "nodes/b"
        fetched = b.parts.peer_blobs
        assert fetched is not None and fetched.fetched_blobs > 0
        await generation.result()
        assert generation.token_ids == continuation(TEXT.encode(), 120, GREEDY)[0]


@pytest.mark.parametrize("sharing", [True, False], ids=["one folder", "folders of their own"])
async def test_forks_of_a_session_elsewhere_begin_with_its_checkpoint(tmp_path: Path, sharing: bool) -> None:
    place = f"file://{tmp_path / 'both'}" if sharing else ""
    async with (
        asyncio.timeout(30),
        served(tmp_path / "a", node="a", catalog=catalog(tmp_path), blobs=place) as a,
        served(tmp_path / "b", workflow=False, node="b", catalog=catalog(tmp_path), blobs=place) as b,
    ):
        session = await a.session("s", TEXT)
        await settled(session)
        await session.checkpoint()
        await session.fork(session_ids=["child"])
        at = len(TEXT) // 16 * 16
        assert await resumed_at(b, "workflows/w/sessions/child") == (at, len(TEXT) - at)
        fetched = b.parts.peer_blobs
        assert fetched is not None and (fetched.fetched_blobs > 0) is not sharing
