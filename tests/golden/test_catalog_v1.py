"""A SQLite catalog of version 1 is brought up to date when it is opened, in one transaction, and loses nothing."""

from pathlib import Path

import apsw
import pytest

from forkpoint.errors import StateIncompatibleError
from forkpoint.statestore.calls import AppendTokens
from forkpoint.statestore.manifest import unseal
from forkpoint.statestore.open import read_marker
from forkpoint.statestore.records import SCHEMA_VERSION, CheckpointPolicy, FinishReason, StoreMarker
from forkpoint.statestore.sqlite import marker, schema
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.golden.make_store import FOLDER, TOKENS, manifest
from tests.support.store import MARKER, POLICY, ManualClock, name, request


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "catalog.sqlite"
    db = apsw.Connection(str(path))
    db.execute((FOLDER / "catalog.sql").read_text())
    db.close()
    return path


def tables(path: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """Every table and index with its columns, whatever the wording of the statement that made it."""
    db = apsw.Connection(str(path))
    names = [str(row[0]) for row in db.execute("SELECT name FROM sqlite_schema ORDER BY name")]
    found = [
        (name, sorted((str(row[1]), str(row[2])) for row in db.execute(f"PRAGMA table_xinfo('{name}')")))
        for name in names
    ]
    db.close()
    return found


async def opened(path: Path) -> SqliteCatalog:
    catalog = SqliteCatalog(path, ManualClock())
    await catalog.open(MARKER)
    return catalog


async def test_everything_in_a_store_of_version_1_is_there(stored: Path) -> None:
    catalog = await opened(stored)
    session, child = await catalog.get_session(name("s")), await catalog.get_session(name("child"))
    assert (session.head, session.epoch, session.owner, session.policy) == (41, 1, "inc-1", POLICY)
    assert (child.head, child.parent, child.policy) == (33, name("s"), CheckpointPolicy(512))
    assert (await catalog.read_log(name("s"), 0, 99)).token_ids == (*TOKENS[:38], 7, 8, 9)
    assert (await catalog.read_log(name("child"), 0, 99)).token_ids == tuple(TOKENS[:33])
    generation = await catalog.get_generation(name("s"), "g-1")
    assert (generation.start, generation.finish) == (35, FinishReason.LENGTH)
    rows = await catalog.list_checkpoints(name("s"))
    assert [(row.checkpoint, row.grid_position, row.expire_us) for row in rows] == [
        ("c-3", 16, None),
        ("c-1", 32, None),
        ("c-2", 32, None),
    ]
    row, sealed = await catalog.get_checkpoint(name("s"), "c-1")
    assert unseal(sealed) == manifest()
    assert [(scanned.number, scanned.held) for scanned in await catalog.scan_manifests(0, 9)] == [(1, True), (2, True)]
    assert await catalog.nearest_checkpoint(name("child"), 33) == row
    assert (await catalog.list_nodes())[0].incarnation == "inc-1"
    assert await catalog.find_request(request("r-1")) is not None
    await catalog.append(AppendTokens(name("s"), 1, (5,)))
    await catalog.close()


async def test_a_store_of_version_1_gets_the_tables_of_a_new_one(stored: Path, tmp_path: Path) -> None:
    await (await opened(stored)).close()
    await (await opened(tmp_path / "new.sqlite")).close()
    assert tables(stored) == tables(tmp_path / "new.sqlite")
    assert read_marker(f"sqlite://{stored}") == MARKER
    await (await opened(stored)).close()


async def test_a_tool_opens_a_store_of_version_1_by_the_marker_that_it_reads(stored: Path) -> None:
    found = read_marker(f"sqlite://{stored}")
    assert found == MARKER
    assert found.schema_version == SCHEMA_VERSION == 3


async def test_another_models_store_of_version_1_is_refused_and_left_alone(stored: Path) -> None:
    before = stored.read_bytes()
    stranger = SqliteCatalog(stored, ManualClock())
    other = StoreMarker(SCHEMA_VERSION, "default", bytes(32), MARKER.tokenizer_digest)
    with pytest.raises(StateIncompatibleError, match="model digest"):
        await stranger.open(other)
    await stranger.close()
    assert marker.read_marker(stored) == StoreMarker(1, "default", MARKER.model_digest, MARKER.tokenizer_digest)
    assert len(before) == stored.stat().st_size


async def test_an_upgrade_that_fails_half_way_leaves_version_1(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = schema.UPGRADES[1].replace("DROP TABLE manifests_of_version_1", "DROP TABLE no_such_table")
    with monkeypatch.context() as patch:
        patch.setitem(schema.UPGRADES, 1, broken)
        with pytest.raises(Exception, match="no_such_table"):
            await opened(stored)
    found = marker.read_marker(stored)
    assert found is not None
    assert found.schema_version == 1
    catalog = await opened(stored)
    assert len(await catalog.scan_manifests(0, 9)) == 2
    await catalog.close()


async def test_a_store_of_a_version_to_come_is_refused(stored: Path) -> None:
    await (await opened(stored)).close()
    db = apsw.Connection(str(stored))
    db.execute("UPDATE meta SET value = ? WHERE key = 'schema_version'", (b"4",))
    db.close()
    catalog = SqliteCatalog(stored, ManualClock())
    with pytest.raises(StateIncompatibleError, match="schema version: the store holds 4, this process has 3"):
        await catalog.open(MARKER)
    await catalog.close()
