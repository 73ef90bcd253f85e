"""`forkpoint check` and the settings of `forkpoint serve` on a catalog in Redis."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkpoint.cli.main import main
from forkpoint.errors import ConfigError
from forkpoint.server.app import check_durability
from forkpoint.statestore.calls import AppendTokens
from tests.support.redis_servers import RedisServerProcess, redis_server
from tests.support.redis_stores import DURABLE, opened
from tests.support.rpc_site import config_for
from tests.support.store import name, owned


@pytest.fixture
def server() -> Iterator[RedisServerProcess]:
    with redis_server("valkey") as started:
        yield started


@pytest.fixture
def arguments(server: RedisServerProcess, tmp_path: Path) -> list[str]:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    return ["check", "--catalog", server.url(), "--blobs", f"file://{blobs}", "--json"]


async def filled(server: RedisServerProcess, *damage: str) -> None:
    """A store with one session, and a command that damages it."""
    async with opened(server.url()) as catalog:
        await owned(catalog, "s")
        for token in range(40):
            await catalog.append(AppendTokens(name("s"), 1, (token,)))
    if damage:
        server.command(*damage)


@pytest.mark.parametrize(
    ("damage", "kinds"),
    [
        ((), set()),
        (("ZREM", "forkpoint:{default:w:w}:live", "s"), {"BAD_INDEX"}),
        (("HSET", "forkpoint:{default:w:w}:session:s", "head", "39"), {"DAMAGED_ROW"}),
    ],
)
def test_check_reads_a_store_in_redis(
    server: RedisServerProcess,
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    damage: tuple[str, ...],
    kinds: set[str],
) -> None:
    asyncio.run(filled(server, *damage))
    status = main(arguments)
    found = json.loads(capsys.readouterr().out)
    assert kinds <= {finding["kind"] for finding in found["findings"]}
    assert (status, found["errors"] > 0) == ((1, True) if kinds else (0, False))


def test_check_says_that_there_is_no_store_and_hides_the_password(
    server: RedisServerProcess, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    server.command("CONFIG", "SET", "requirepass", "secret")
    arguments[2] = f"redis://:secret@{server.address}/?namespace=other"
    assert main(arguments) != 0
    said = capsys.readouterr().err
    assert "there is no store at" in said
    assert "secret" not in said


async def test_serve_refuses_a_redis_below_its_durability_and_says_what_to_set(
    server: RedisServerProcess, tmp_path: Path
) -> None:
    server.command("CONFIG", "SET", "requirepass", "secret")
    url = f"redis://:secret@{server.address}/"
    config = config_for(tmp_path, catalog=url)
    async with opened(url) as catalog:
        with pytest.raises(ConfigError, match="appendonly is no") as refused:
            check_durability(config, catalog)
        assert refused.value.key == "durability"
        assert "secret" not in str(refused.value)
        check_durability(config_for(tmp_path, catalog=url, durability="memory"), catalog)
    with redis_server("valkey", *DURABLE) as durable:
        config = config_for(tmp_path, catalog=durable.url())
        async with opened(durable.url()) as catalog:
            check_durability(config, catalog)
            with pytest.raises(ConfigError, match="below replicated"):
                check_durability(config_for(tmp_path, catalog=durable.url(), durability="replicated"), catalog)
