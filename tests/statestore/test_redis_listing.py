"""What lies in two slots of Redis, one step after the other: lists of open generations, references to manifests."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from forkpoint.errors import NotFoundError, PreconditionError, StaleEpochError, StoreUnavailableError
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, StepCommit
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.errors import BlobsCondemnedError
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.records import CheckpointRow, FinishReason, RequestKey, WorkflowRow
from forkpoint.statestore.redis import checkpoints, manifests, sessions
from forkpoint.statestore.redis.catalog import RedisCatalog
from forkpoint.statestore.repair import repair
from tests.support.redis_servers import RedisServerProcess, redis_server
from tests.support.redis_stores import opened, products
from tests.support.store import MARKER, PARAMS, name, owned

ROOT = root_hash(MARKER)
STORE = "forkpoint:{default:store}"


@pytest.fixture(params=products())
def server(request: pytest.FixtureRequest) -> Iterator[RedisServerProcess]:
    with redis_server(request.param) as started:
        yield started


async def begin(catalog: RedisCatalog, workflow: str, generation: str) -> None:
    await catalog.begin_generation(BeginGeneration(name("s", workflow), 1, generation, PARAMS, (1,)))


async def finish(catalog: RedisCatalog, workflow: str, generation: str) -> None:
    head = (await catalog.get_session(name("s", workflow))).head
    commit = StepCommit(name("s", workflow), 1, head, (), generation, (), FinishReason.STOP)
    await catalog.commit_step([commit])


async def generating(catalog: RedisCatalog) -> set[str]:
    return {row.name.workflow for row in await catalog.list_open_generations()}


async def test_a_workflow_is_listed_once_and_taken_off_when_it_rests(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        await owned(catalog, "s", "w")
        await begin(catalog, "w", "g1")
        await finish(catalog, "w", "g1")
        await begin(catalog, "w", "g2")
        assert server.command("SCARD", f"{STORE}:generating") == 1
        assert await generating(catalog) == {"w"}
        await finish(catalog, "w", "g2")
        assert await generating(catalog) == set()
        assert server.command("SCARD", f"{STORE}:generating") == 0
        await begin(catalog, "w", "g3")
        assert await generating(catalog) == {"w"}
        assert await catalog.self_check() == []


async def test_a_begin_that_was_on_its_way_while_its_entry_went_lists_itself_anew(
    server: RedisServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url()) as catalog, opened(server.url()) as other:
        await owned(catalog, "s", "w")
        listed = sessions.list_generating
        times = 0

        async def list_then_lose(access: object, workflow: str) -> str:
            nonlocal times
            token = await listed(access, workflow)  # type: ignore[arg-type]
            times += 1
            if times == 1:
                # Between the entry and the generation, another node finds the workflow at rest.
                assert await generating(other) == set()
                assert server.command("SCARD", f"{STORE}:generating") == 0
            return token

        monkeypatch.setattr(sessions, "list_generating", list_then_lose)
        await begin(catalog, "w", "g")
        assert times == 2
        assert await generating(other) == {"w"}
        assert await other.self_check() == []


async def test_no_open_generation_is_missed_however_lists_and_begins_meet(
    server: RedisServerProcess, rng: random.Random
) -> None:
    async with opened(server.url()) as one, opened(server.url()) as other:
        workflows = [f"w{index}" for index in range(6)]
        for workflow in workflows:
            await owned(one, "s", workflow)
        done = False

        async def look() -> None:
            while not done:
                await other.list_open_generations()

        async def work(workflow: str) -> None:
            for turn in range(15):
                await begin(one, workflow, f"g{turn}")
                await asyncio.sleep(rng.random() * 0.002)
                if turn < 14:
                    await finish(one, workflow, f"g{turn}")

        async with asyncio.TaskGroup() as group:
            looking = group.create_task(look())
            await asyncio.gather(*(work(workflow) for workflow in workflows))
            done = True
            await looking
        assert await generating(other) == set(workflows)
        assert await other.self_check() == []


# --- checkpoints and their manifests -------------------------------------------------------------------------------
def row(checkpoint: str, session: str = "s") -> CheckpointRow:
    return CheckpointRow(name(session), checkpoint, 0, 0, ROOT, "n", True, 0)


@asynccontextmanager
async def broken_off(module: object, function: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """A process that dies where it would call a function of a module."""

    async def die(*_arguments: object) -> None:
        raise StoreUnavailableError("test", "the process died here")

    with monkeypatch.context() as patched:
        patched.setattr(module, function, die)
        yield


async def test_a_put_that_breaks_off_leaves_a_reference_and_no_checkpoint(
    server: RedisServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url()) as catalog:
        await owned(catalog, "s")
        async with broken_off(checkpoints, "_put_row", monkeypatch):
            with pytest.raises(StoreUnavailableError):
                await catalog.put_checkpoint(row("c"), b"m", 1)
        assert [finding.kind for finding in await catalog.self_check()] == ["LEAKED_REFERENCE"]
        assert [scanned.held for scanned in await catalog.scan_manifests(0, 10)] == [True]
        with pytest.raises(NotFoundError):
            await catalog.get_checkpoint(name("s"), "c")
        await catalog.put_checkpoint(row("c"), b"m", 1)
        await catalog.delete_checkpoint(name("s"), "c")
        assert not await catalog.remove_manifest(row("c").manifest_key)


async def test_a_deletion_that_breaks_off_is_finished_by_the_next_one(
    server: RedisServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url()) as catalog:
        await owned(catalog, "s")
        for checkpoint in ("a", "b"):
            await catalog.put_checkpoint(row(checkpoint), b"m", 1)
        async with broken_off(manifests, "drop_references", monkeypatch):
            await catalog.delete_checkpoint(name("s"), "a")
        assert [finding.kind for finding in await catalog.self_check()] == ["LEAKED_REFERENCE"]
        await catalog.drop_checkpoints("w", await catalog.lineage("w"), [("s", "b")])
        assert await catalog.self_check() == []
        assert await catalog.remove_manifest(row("a").manifest_key)


async def test_a_checkpoint_made_again_keeps_its_manifest_when_the_old_one_s_removal_ends_late(
    server: RedisServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url()) as catalog:
        await owned(catalog, "s")
        await catalog.put_checkpoint(row("c"), b"m", 1)
        async with broken_off(manifests, "drop_references", monkeypatch):
            await catalog.delete_checkpoint(name("s"), "c")
        await catalog.put_checkpoint(row("c"), b"m", 1)
        await catalog.drop_checkpoints("w", await catalog.lineage("w"), [])
        assert not await catalog.remove_manifest(row("c").manifest_key)
        assert (await catalog.get_checkpoint(name("s"), "c"))[1] == b"m"
        assert await catalog.self_check() == []


async def test_an_owner_that_lost_its_epoch_on_the_way_takes_its_reference_back(
    server: RedisServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url()) as catalog, opened(server.url()) as other:
        await owned(catalog, "s")
        put = manifests.put

        async def put_late(*arguments: object) -> str:
            reference = await put(*arguments)  # type: ignore[arg-type]
            await other.acquire(name("s"), "node-b", 1)
            return reference

        monkeypatch.setattr(manifests, "put", put_late)
        with pytest.raises(StaleEpochError):
            await catalog.put_checkpoint(row("c"), b"m", 1, RequestKey("me", "w", "r", b"d"))
        assert await catalog.self_check() == []
        assert await catalog.remove_manifest(row("c").manifest_key)


async def test_a_checkpoint_whose_log_was_rewound_on_the_way_is_refused(
    server: RedisServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url()) as catalog, opened(server.url()) as other:
        await owned(catalog, "s")
        await catalog.append(AppendTokens(name("s"), 1, tuple(range(20))))
        grid, chain_hash = grid_hashes(ROOT, tuple(range(20)))[1]
        put = manifests.put

        async def put_late(*arguments: object) -> str:
            reference = await put(*arguments)  # type: ignore[arg-type]
            await other.rewind(name("s"), 1, 3)
            await other.append(AppendTokens(name("s"), 1, (7,) * 30))
            return reference

        monkeypatch.setattr(manifests, "put", put_late)
        late = CheckpointRow(name("s"), "c", 20, grid, chain_hash, "n", True, 0)
        with pytest.raises(PreconditionError, match="not the log's"):
            await catalog.put_checkpoint(late, b"m", 1)
        assert await catalog.list_checkpoints(name("s")) == []
        assert await catalog.self_check() == []
        assert await catalog.remove_manifest(late.manifest_key)


async def test_repair_takes_a_leaked_reference_back_and_a_put_under_way_starts_anew(
    server: RedisServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(server.url()) as catalog, opened(server.url()) as other:
        await owned(catalog, "s")
        put, times = manifests.put, 0

        async def put_and_wait(*arguments: object) -> str:
            nonlocal times
            reference = await put(*arguments)  # type: ignore[arg-type]
            times += 1
            if times == 1:
                # As for a put that broke off here: nothing tells the two apart.
                repaired = [one async for one in repair(other, MemoryBlobs(), await other.self_check())]
                assert [(one.finding.kind, one.done) for one in repaired] == [("LEAKED_REFERENCE", True)]
                assert await other.remove_manifest(row("c").manifest_key)
            return reference

        monkeypatch.setattr(manifests, "put", put_and_wait)
        await catalog.put_checkpoint(row("c"), b"m", 1)
        assert times == 2
        assert (await catalog.get_checkpoint(name("s"), "c"))[1] == b"m"
        assert await catalog.self_check() == []
        held = server.command("SMEMBERS", f"{STORE}:references:{ROOT.hex()}:0 n")
        assert isinstance(held, set | list)
        (reference,) = held
        assert not await other.cancel_reference(f"{ROOT.hex()}:0 n", reference.decode())


async def test_a_condemned_blob_is_refused_before_anything_is_written(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        await owned(catalog, "s")
        await catalog.elect_collector("tier", "node", 0)
        digests = [bytes([index]).hex() * 32 for index in range(5)]
        await catalog.condemn("tier", 1, digests[1:3])
        with pytest.raises(BlobsCondemnedError) as refused:
            await catalog.put_checkpoint(row("c"), b"m", 1, digests=digests)
        assert refused.value.digests == tuple(digests[1:3])
        assert await catalog.scan_manifests(0, 10) == []


async def test_what_only_the_keys_show_is_found(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        for session in ("s", "t"):
            await owned(catalog, session)
        await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1,)))
        await catalog.put_checkpoint(row("c"), b"m", 1)
        base = "forkpoint:{default:w:w}"
        branch = (await catalog.get_session(name("s"))).branch
        damage: dict[str, list[tuple[str | int, ...]]] = {
            "BAD_INDEX": [
                ("ZREM", f"{base}:sessions", "s"),
                ("ZREM", f"{base}:live", "s"),
                ("ZREM", f"{base}:open", "s"),
                ("ZADD", f"{base}:open", 0, "t"),
                ("DEL", f"{base}:session:t"),
                ("ZREM", f"{STORE}:workflows", "w"),
                ("DEL", f"{STORE}:generating"),
                ("DEL", f"{base}:checkpoint:s:c"),
            ],
            "ORPHAN_BRANCH": [("HDEL", f"{base}:branches", branch)],
            "ORPHAN_LOG": [("XADD", f"{base}:log:77", "5-1", "r", "x")],
            "WRONG_PARENT": [("HSET", f"{base}:branches", branch, "12345 3")],
            "OPEN_GENERATION": [("HSET", f"{base}:generation:s:g", "finish", "STOP")],
            "GENERATION_BEYOND_HEAD": [("HSET", f"{base}:generation:s:g", "start", "9")],
            "MANIFEST_MISSING": [("DEL", f"{STORE}:manifest:{ROOT.hex()}:0 n")],
            "REFERENCE_MISSING": [("DEL", f"{STORE}:references:{ROOT.hex()}:0 n")],
            "ORPHAN_SESSION": [("DEL", f"{base}:workflow")],
            "LEAKED_REFERENCE": [("SADD", f"{STORE}:references:{ROOT.hex()}:0 n", "w s none token")],
        }
        assert await catalog.self_check() == []
        for kind, commands in damage.items():
            for command in commands:
                server.command("DEL", "copy")
                key = command[1]
                server.command("COPY", key, "copy")
                server.command(*command)
                kinds = {finding.kind for finding in await catalog.self_check()}
                assert kind in kinds, command
                server.command("DEL", key)
                server.command("COPY", "copy", key)
                assert await catalog.self_check() == [], command


async def test_a_workflow_that_is_listed_and_not_there_is_none(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        for index in range(600):
            server.command("ZADD", f"{STORE}:workflows", 0, f"a{index:03}")
        for workflow in ("a100-x", "a300-x", "b"):
            await catalog.create_workflow(WorkflowRow(workflow))
        listed = [found.workflow for found in await catalog.list_workflows("", 2)]
        assert listed == ["a100-x", "a300-x"]
        assert [found.workflow for found in await catalog.list_workflows("a300-x", 9)] == ["b"]
        assert await catalog.list_sessions(None, None, 10) == []
