"""The Redis catalog on a cluster whose slots move and whose servers fail, and behind Sentinels that fail over."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from forkpoint.errors import LogTailMissingError, StoreUnavailableError
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit, StepStatus
from forkpoint.statestore.redis.catalog import RedisCatalog
from forkpoint.statestore.redis.keys import KeySpace
from forkpoint.statestore.redis.slots import slot_of
from tests.support.redis_servers import RedisServerProcess, free_port, redis_cluster, redis_server
from tests.support.redis_stores import opened, products
from tests.support.store import PARAMS, name, new, owned

KEYS = KeySpace("default")


@pytest.fixture(params=products())
def cluster(request: pytest.FixtureRequest) -> Iterator[Sequence[RedisServerProcess]]:
    with redis_cluster(request.param) as started:
        yield started


def slot_owner(cluster: Sequence[RedisServerProcess], workflow: str) -> int:
    """Index of the server that has a workflow's slot."""
    slot = slot_of(KEYS.workflow(workflow))
    return next(i for i in range(len(cluster)) if slot < 16_384 * (i + 1) // len(cluster))


def spread(cluster: Sequence[RedisServerProcess]) -> list[str]:
    """A workflow on every server."""
    names = [f"w{index}" for index in range(100)]
    return [next(n for n in names if slot_owner(cluster, n) == index) for index in range(len(cluster))]


async def begun(catalog: RedisCatalog, workflow: str) -> None:
    """A session `s` of a workflow that generates, its head at 3."""
    await owned(catalog, "s", workflow)
    await catalog.begin_generation(BeginGeneration(name("s", workflow), 1, "g", PARAMS, (1, 2, 3)))


async def test_workflows_lie_on_all_servers_and_any_of_them_leads_there(cluster: Sequence[RedisServerProcess]) -> None:
    workflows = spread(cluster)
    async with opened(cluster[2].url()) as catalog:
        for workflow in workflows:
            await begun(catalog, workflow)
        commits = [StepCommit(name("s", workflow), 1, 3, (4,), "g") for workflow in workflows]
        assert {o.status for o in await catalog.commit_step(commits)} == {StepStatus.COMMITTED}
    async with opened(cluster[0].url()) as other:
        rows = await other.list_open_generations()
        assert sorted((row.name.workflow, row.head) for row in rows) == sorted((workflow, 4) for workflow in workflows)
        assert await other.self_check() == []
    for server, workflow in zip(cluster, workflows, strict=True):
        assert server.command("EXISTS", f"{KEYS.workflow(workflow)}:session:s") == 1


async def test_one_dead_server_costs_only_the_workflows_on_it(cluster: Sequence[RedisServerProcess]) -> None:
    for server in cluster:
        server.command("CONFIG", "SET", "cluster-require-full-coverage", "no")
    workflows = spread(cluster)
    async with opened(",".join((cluster[0].url()[:-1], cluster[1].address)) + "/?timeout=2") as catalog:
        for workflow in workflows:
            await begun(catalog, workflow)
        cluster[2].kill()
        commits = [StepCommit(name("s", workflow), 1, 3, (4,), "g") for workflow in workflows]
        with pytest.raises(StoreUnavailableError):
            await catalog.commit_step(commits)
        for workflow in workflows[:2]:
            if slot_owner(cluster, workflow) != 2:
                assert (await catalog.get_session(name("s", workflow))).head == 4
        outcomes = await catalog.commit_step(commits[:2])
        assert {(outcome.status, outcome.head) for outcome in outcomes} == {(StepStatus.CONFLICT, 4)}


async def test_a_slot_that_moves_is_followed_and_no_function_runs_meanwhile(
    cluster: Sequence[RedisServerProcess],
) -> None:
    workflow = spread(cluster)[0]
    source, target = cluster[0], cluster[1]
    slot, base = slot_of(KEYS.workflow(workflow)), KEYS.workflow(workflow)
    ids = {server.port: _text(server.command("CLUSTER", "MYID")) for server in cluster}
    async with opened(source.url("timeout=30")) as catalog:
        await begun(catalog, workflow)
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", ids[source.port])
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", ids[target.port])
        keys = source.command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        assert isinstance(keys, list)
        assert f"{base}:session:s".encode() in keys
        moved = keys[: len(keys) // 2]
        for key in moved:
            source.command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
        async with asyncio.TaskGroup() as group:
            commit = group.create_task(catalog.commit_step([StepCommit(name("s", workflow), 1, 3, (4,), "g")]))
            append = group.create_task(catalog.fork(ForkSessions(name("s", workflow), 2, (new("c", workflow),))))
            await asyncio.sleep(0.3)
            assert not commit.done()
            assert not append.done()
            for key in keys[len(keys) // 2 :]:
                source.command("MIGRATE", "127.0.0.1", target.port, key, 0, 5000)
            for server in (target, source, cluster[2]):
                server.command("CLUSTER", "SETSLOT", slot, "NODE", ids[target.port])
        assert [outcome.status for outcome in commit.result()] == [StepStatus.COMMITTED]
        assert (await catalog.read_log(name("s", workflow), 0, 9)).token_ids == (1, 2, 3, 4)
        assert (await catalog.read_log(name("c", workflow), 0, 9)).token_ids == (1, 2)
        assert target.command("EXISTS", f"{base}:session:s") == 1
        assert await catalog.self_check() == []


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# --- Sentinel ------------------------------------------------------------------------------------------------------
@asynccontextmanager
async def sentinel(product: str, primary: RedisServerProcess, folder: Path) -> AsyncIterator[RedisServerProcess]:
    """A Sentinel that watches `primary` as the service `forkpoint`."""
    port = free_port()
    file = folder / "sentinel.conf"
    file.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {folder}\n"
        f"sentinel monitor forkpoint 127.0.0.1 {primary.port} 1\n"
        "sentinel down-after-milliseconds forkpoint 500\nsentinel failover-timeout forkpoint 3000\n"
    )
    process = RedisServerProcess(product, folder=folder, port=port, command=(str(file), "--sentinel"))
    try:
        await asyncio.to_thread(process.start)
        async with asyncio.timeout(20):
            while not process.command("SENTINEL", "REPLICAS", "forkpoint"):
                await asyncio.sleep(0.1)
        yield process
    finally:
        process.close()


@pytest.mark.parametrize("product", products())
async def test_a_failover_by_sentinel_is_followed_and_a_lost_tail_is_data_loss(product: str, tmp_path: Path) -> None:
    with redis_server(product) as primary, redis_server(product, "--replicaof", f"127.0.0.1 {primary.port}") as replica:
        async with sentinel(product, primary, tmp_path) as watcher:
            url = f"redis+sentinel://{watcher.address}/forkpoint?timeout=2"
            async with opened(url) as catalog:
                await owned(catalog, "kept")
                await owned(catalog, "short")
                for session in ("kept", "short"):
                    await catalog.append(AppendTokens(name(session), 1, (1, 2, 3)))
                await _caught_up(primary, replica)
                # A replica that gets nothing any more, as over a broken line, and is chosen all the same.
                replica.pause()
                primary.command("CLIENT", "KILL", "TYPE", "replica")
                await catalog.append(AppendTokens(name("short"), 1, (4, 5)))
                primary.kill()
                replica.resume()
                await _recovered(catalog)
                outcome = await catalog.append(AppendTokens(name("kept"), 1, (4,), expected_position=3))
                assert outcome.head == 4
                with pytest.raises(LogTailMissingError) as lost:
                    await catalog.append(AppendTokens(name("short"), 1, (6,)))
                assert (lost.value.client_position, lost.value.head) == (5, 3)


async def _caught_up(primary: RedisServerProcess, replica: RedisServerProcess) -> None:
    async with asyncio.timeout(20):
        while True:
            ours, theirs = primary.command("INFO", "replication"), replica.command("INFO", "replication")
            assert isinstance(ours, dict)
            assert isinstance(theirs, dict)
            if ours["master_repl_offset"] == theirs.get("slave_repl_offset"):
                return
            await asyncio.sleep(0.05)


async def _recovered(catalog: RedisCatalog) -> None:
    """Until a write goes through."""
    async with asyncio.timeout(30):
        while True:
            try:
                await catalog.update_session(name("kept"), None)
            except StoreUnavailableError:
                await asyncio.sleep(0.1)
            else:
                return
