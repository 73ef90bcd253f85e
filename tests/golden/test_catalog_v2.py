"""Catalogs of version 2, in SQLite and in Redis, are brought up to date when they are opened, and lose nothing."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import apsw
import pytest

from forkpoint.errors import StateIncompatibleError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import BeginGeneration, StepCommit, StepStatus
from forkpoint.statestore.check import Severity, check
from forkpoint.statestore.manifest import unseal
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.open import find_marker
from forkpoint.statestore.records import FinishReason, NodeRow, NodeStatus, SessionState, StoreMarker
from forkpoint.statestore.redis.catalog import RedisCatalog
from forkpoint.statestore.redis.url import parse_redis_url
from forkpoint.statestore.sqlite import marker, schema
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.golden.make_store import TOKENS, manifest
from tests.golden.test_catalog_v1 import tables
from tests.support.redis_servers import redis_server, shared_server
from tests.support.redis_stores import products, redis_catalog, store_url
from tests.support.store import MARKER, PARAMS, POLICY, ManualClock, name, request

FOLDER = Path(__file__).parent / "store-v2"
OpenStore = Callable[[], Awaitable[Catalog]]


def restore_sqlite(path: Path) -> None:
    db = apsw.Connection(str(path))
    db.execute((FOLDER / "catalog.sql").read_text())
    db.close()


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "catalog.sqlite"
    restore_sqlite(path)
    return path


@pytest.fixture(params=["sqlite", *products()])
async def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[OpenStore]:
    """Opens the golden store of a backend, as often as it is called."""
    backend, made = request.param, list[Catalog]()
    if backend == "sqlite":
        restore_sqlite(tmp_path / "catalog.sqlite")
    else:
        store_url(backend, tmp_path)
        for command in json.loads((FOLDER / "redis.json").read_text()):
            shared_server(backend).command(*(part.encode("latin-1") for part in command))

    async def again() -> Catalog:
        clock = ManualClock()
        catalog: Catalog = (
            SqliteCatalog(tmp_path / "catalog.sqlite", clock)
            if backend == "sqlite"
            else redis_catalog(backend, tmp_path, clock)
        )
        made.append(catalog)
        await catalog.open(MARKER)
        return catalog

    yield again
    for catalog in made:
        await catalog.close()


async def test_everything_in_a_store_of_version_2_is_there(reopen: OpenStore) -> None:
    catalog = await reopen()
    rows = {row.name.session: row for row in await catalog.list_sessions("w", None, 99, show_deleted=True)}
    assert [(key, row.head, row.epoch, row.owner, row.state.value) for key, row in sorted(rows.items())] == [
        ("child", 33, 0, "", "ACTIVE"),
        ("gone", 3, 2, "", "DELETED"),
        ("isolated", 3, 1, "", "QUARANTINED"),
        ("paused", 3, 1, "", "PAUSED"),
        ("s", 42, 1, "inc-1", "ACTIVE"),
        ("taken", 3, 2, "inc-2", "ACTIVE"),
    ]
    for row in rows.values():
        assert (row.standbys, row.migration, row.migration_target, row.takeovers, row.takeover_head) == (
            0,
            "",
            "",
            0,
            0,
        )
    assert (rows["s"].policy, rows["child"].parent) == (POLICY, name("s"))
    assert (await catalog.read_log(name("s"), 0, 99)).token_ids == (*TOKENS, 40, 41)
    assert (await catalog.read_log(name("child"), 0, 99)).token_ids == tuple(TOKENS[:33])
    generation = await catalog.open_generation(name("s"))
    assert generation is not None
    assert (generation.generation, generation.start, generation.request_id) == ("g-1", 35, "r-1")
    _, sealed = await catalog.get_checkpoint(name("s"), "c-1")
    assert unseal(sealed) == manifest()
    assert [pin.pin for pin in await catalog.list_pins()] == ["p-1"]
    assert await catalog.list_condemned("tier", "", 9) == ["ab" * 32]
    node = NodeRow("inc-1", "node-a", "localhost:1", "cpu-2-threads", 2, "/run/lock")
    assert await catalog.list_nodes() == [node]
    assert [(row.labels, row.standbys) for row in await catalog.list_workflows("", 9)] == [({"team": "blue"}, 0)]


async def test_answers_that_version_2_stored_are_given_again(reopen: OpenStore) -> None:
    catalog = await reopen()
    row = await catalog.acquire(name("s"), "inc-1", 0, request("r-a"))
    assert (row.epoch, row.owner, row.standbys, row.migration) == (1, "inc-1", 0, "")
    row = await catalog.release(name("paused"), 1, SessionState.PAUSED, request=request("r-r"))
    assert (row.state, row.state_reason, row.takeovers) == (SessionState.PAUSED, "paused by a caller", 0)


async def test_a_store_of_version_2_does_what_one_of_this_version_does(reopen: OpenStore) -> None:
    catalog = await reopen()
    commit = StepCommit(name("s"), 1, 42, (42,), "g-1", (-0.5,), FinishReason.STOP)
    assert [outcome.status for outcome in await catalog.commit_step([commit])] == [StepStatus.COMMITTED]
    row = await catalog.begin_migration(name("s"), 1, "m", "inc-2")
    moved = await catalog.cut_over(name("s"), 1, "m", "inc-2", row.head, row.head_hash)
    assert (moved.epoch, moved.owner, moved.head) == (2, "inc-2", 43)
    await catalog.begin_generation(BeginGeneration(name("taken"), 2, "g-2", PARAMS))
    assert (await catalog.acquire(name("taken"), "inc-3", 2)).takeovers == 1
    assert (await catalog.release_quarantine(name("isolated"))).state is SessionState.ACTIVE
    assert (await catalog.update_session(name("child"), None, standbys=1)).standbys == 1
    assert (await catalog.update_workflow("w", None, None, standbys=2)).standbys == 2
    status = NodeStatus(draining=True, slots_total=4)
    await catalog.renew_lease("inc-1", status)
    assert (await catalog.list_nodes())[0].status == status
    found = [str(finding) async for finding in check(catalog, MemoryBlobs()) if finding.severity is Severity.ERROR]
    assert all("BLOB" in finding for finding in found), found
    again = await reopen()
    assert await again.get_session(name("s")) == moved


async def test_a_store_of_version_2_gets_the_tables_of_a_new_one(stored: Path, tmp_path: Path) -> None:
    for path in (stored, tmp_path / "new.sqlite"):
        catalog = SqliteCatalog(path, ManualClock())
        await catalog.open(MARKER)
        await catalog.close()
    assert tables(stored) == tables(tmp_path / "new.sqlite")
    assert marker.read_marker(stored) == MARKER


async def test_an_upgrade_that_fails_half_way_leaves_version_2(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = schema.UPGRADES[2] + "DROP TABLE no_such_table;"
    catalog = SqliteCatalog(stored, ManualClock())
    with monkeypatch.context() as patch:
        patch.setitem(schema.UPGRADES, 2, broken)
        with pytest.raises(Exception, match="no_such_table"):
            await catalog.open(MARKER)
    await catalog.close()
    found = marker.read_marker(stored)
    assert found is not None
    assert found.schema_version == 2
    catalog = SqliteCatalog(stored, ManualClock())
    await catalog.open(MARKER)
    assert (await catalog.get_session(name("s"))).head == 42
    await catalog.close()


async def open_once(url: str, ours: StoreMarker) -> None:
    catalog = RedisCatalog(parse_redis_url("catalog", url), ManualClock())
    try:
        await catalog.open(ours)
    finally:
        await catalog.close()


@pytest.mark.parametrize("product", products())
async def test_a_server_keeps_another_models_store_of_version_2_and_refuses_versions_to_come(product: str) -> None:
    other = StoreMarker(MARKER.schema_version, "default", bytes(32), MARKER.tokenizer_digest)
    with redis_server(product) as server:
        for command in json.loads((FOLDER / "redis.json").read_text()):
            server.command(*(part.encode("latin-1") for part in command))
        with pytest.raises(StateIncompatibleError, match="model digest"):
            await open_once(server.url(), other)
        assert server.command("HGET", "forkpoint:{default:store}:marker", "schema") == b"2"
        assert await find_marker(server.url()) == MARKER, "a tool opens it by the marker that it reads"
        await open_once(server.url(), MARKER)
        assert server.command("HGET", "forkpoint:{default:store}:marker", "schema") == b"3"
        server.command("HSET", "forkpoint:{default:store}:marker", "schema", "4")
        with pytest.raises(StateIncompatibleError, match="schema version: the store holds 4, this process has 3"):
            await open_once(server.url(), MARKER)
