"""The Redis catalog against a server that loses things, is full, is replaced or knows less than it said."""

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace

import pytest

from forkpoint.errors import (
    LogCorruptError,
    LogTailMissingError,
    StoreFullError,
    StoreUnavailableError,
)
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit, StepStatus
from forkpoint.statestore.check import check
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.records import CheckpointRow, Durability, FinishReason, WorkflowRow
from forkpoint.statestore.redis.catalog import RedisCatalog
from forkpoint.statestore.redis.lualib import prefix, source
from tests.support.redis_proxy import redis_proxy
from tests.support.redis_servers import RedisServerProcess, redis_server
from tests.support.redis_stores import DURABLE, opened, products
from tests.support.store import PARAMS, name, new, owned, request


@pytest.fixture(params=products())
def server(request: pytest.FixtureRequest) -> Iterator[RedisServerProcess]:
    with redis_server(request.param) as started:
        yield started


@pytest.fixture(params=products())
def durable(request: pytest.FixtureRequest) -> Iterator[RedisServerProcess]:
    with redis_server(request.param, *DURABLE) as started:
        yield started


def fcalls(server: RedisServerProcess) -> int:
    """How many functions the server has run."""
    stats = server.command("INFO", "commandstats")
    assert isinstance(stats, dict)
    return sum(int(stats.get(f"cmdstat_{command}", {}).get("calls", 0)) for command in ("fcall", "fcall_ro"))


# --- round trips ---------------------------------------------------------------------------------------------------
async def test_a_step_of_many_sessions_is_one_call_a_workflow(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        names = [name(f"s{index}", f"w{index % 2}") for index in range(64)]
        for session in names:
            await owned(catalog, session.session, session.workflow)
            await catalog.begin_generation(BeginGeneration(session, 1, "g", PARAMS, (1, 2, 3)))
        before = fcalls(server)
        for step in range(20):
            commits = [StepCommit(session, 1, 3 + step, (step,), "g") for session in names]
            outcomes = await catalog.commit_step(commits)
            assert {outcome.status for outcome in outcomes} == {StepStatus.COMMITTED}
        assert fcalls(server) - before == 20 * 2
        before = fcalls(server)
        await catalog.commit_step([StepCommit(names[0], 1, 23, (), "g", finish=FinishReason.STOP)])
        await catalog.append(AppendTokens(names[0], 1, tuple(range(10_000))))
        await catalog.fork(ForkSessions(names[0], None, (new("child", "w0"),)))
        assert fcalls(server) - before == 3


async def test_a_writer_whose_head_is_behind_goes_on_from_the_row(server: RedisServerProcess) -> None:
    async with opened(server.url()) as one, opened(server.url()) as other:
        await owned(one, "s")
        for index in range(40):
            outcome = await (one, other)[index % 2].append(AppendTokens(name("s"), 1, (index,) * 3))
            assert (outcome.start, outcome.head) == (3 * index, 3 * index + 3)
        tokens = (await one.read_log(name("s"), 0, 1000)).token_ids
        assert tokens == tuple(index for index in range(40) for _ in range(3))


async def test_a_writer_that_knows_the_same_position_on_another_branch_goes_on_from_the_row(
    server: RedisServerProcess,
) -> None:
    async with opened(server.url()) as one, opened(server.url()) as other:
        for session in ("appends", "steps"):
            await owned(one, session)
            await one.append(AppendTokens(name(session), 1, tuple(range(20))))
            await other.rewind(name(session), 1, 3)
            await other.append(AppendTokens(name(session), 1, (7,) * 17))
        await one.append(AppendTokens(name("appends"), 1, (9,)))
        await other.begin_generation(BeginGeneration(name("steps"), 1, "g", PARAMS))
        (outcome,) = await one.commit_step([StepCommit(name("steps"), 1, 20, (9,), "g")])
        assert outcome.status is StepStatus.COMMITTED
        for session in ("appends", "steps"):
            assert (await one.read_log(name(session), 0, 99)).token_ids == (0, 1, 2, *(7,) * 17, 9)


async def test_appends_at_once_by_two_processes_all_land_once(server: RedisServerProcess) -> None:
    async with opened(server.url()) as one, opened(server.url()) as other:
        await owned(one, "s")
        calls = [
            catalog.append(AppendTokens(name("s"), 1, (index, index), request=request(f"r{index}")))
            for index in range(12)
            for catalog in (one, other)
        ]
        outcomes = await asyncio.gather(*calls)
        assert sorted(outcome.replayed for outcome in outcomes) == [False] * 12 + [True] * 12
        tokens = (await one.read_log(name("s"), 0, 1000)).token_ids
        assert sorted(tokens) == sorted([*range(12)] * 2)
        assert all(tokens[at] == tokens[at + 1] for at in range(0, 24, 2))


async def test_a_long_log_is_read_in_steps(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        await owned(catalog, "s")
        tokens: list[int] = []
        for part, count in enumerate((1300, 40, 1)):
            for token in range(count):
                await catalog.append(AppendTokens(name("s"), 1, (token,)))
                tokens.append(token)
            await catalog.append(AppendTokens(name("s"), 1, tuple(range(part * 5000))))
            tokens += range(part * 5000)
            await catalog.rewind(name("s"), 1, len(tokens) - 3)
            del tokens[-3:]
        for start, limit in ((0, 20_000), (1, 1500), (1023, 3), (0, len(tokens) - 1), (len(tokens) - 4, 4), (1290, 60)):
            read = (await catalog.read_log(name("s"), start, limit)).token_ids
            assert read == tuple(tokens[start : start + limit])


# --- lost answers and lost requests --------------------------------------------------------------------------------
async def test_a_lost_answer_is_told_apart_from_a_lost_request_by_the_request_id(server: RedisServerProcess) -> None:
    async with redis_proxy(server.port) as proxy, opened(proxy.url()) as catalog:
        await owned(catalog, "s")
        for index, lose in enumerate((proxy.lose_next_answer, proxy.lose_next_request)):
            call = AppendTokens(name("s"), 1, (index,), expected_position=index, request=request(f"r{index}"))
            lose()
            with pytest.raises(StoreUnavailableError):
                await catalog.append(call)
            outcome = await catalog.append(call)
            assert (outcome.replayed, outcome.start, outcome.head) == (index == 0, index, index + 1)


async def test_a_step_whose_answer_was_lost_is_not_done_twice(server: RedisServerProcess) -> None:
    async with redis_proxy(server.port) as proxy, opened(proxy.url()) as catalog:
        await owned(catalog, "s")
        await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1, 2)))
        commit = StepCommit(name("s"), 1, 2, (3,), "g")
        proxy.lose_next_answer()
        with pytest.raises(StoreUnavailableError):
            await catalog.commit_step([commit])
        (outcome,) = await catalog.commit_step([commit])
        assert (outcome.status, outcome.head) == (StepStatus.CONFLICT, 3)
        assert (await catalog.read_log(name("s"), 0, 10)).token_ids == (1, 2, 3)


async def test_every_lost_answer_of_a_put_checkpoint_leaves_the_store_sound(server: RedisServerProcess) -> None:
    async with redis_proxy(server.port) as proxy, opened(proxy.url()) as catalog, opened(server.url()) as healthy:
        await owned(catalog, "s")
        await catalog.append(AppendTokens(name("s"), 1, tuple(range(40))))
        root = (await owned(catalog, "empty")).head_hash
        row = CheckpointRow(name("s"), "c", 40, 0, root, "n", True, 0)
        for attempt in range(8):
            for _ in range(attempt):
                await catalog.list_nodes()
            key = request(f"r{attempt}")
            put = replace(row, checkpoint=f"c{attempt}")
            async with asyncio.TaskGroup() as group:
                task = group.create_task(_attempt(catalog, put, key))
                for _ in range(attempt * 3):
                    await asyncio.sleep(0.001)
                proxy.lose_next_answer()
            await task
            proxy._lose_answer = False
            saved = await catalog.put_checkpoint(put, b"m", 1, key)
            assert (await catalog.get_checkpoint(name("s"), f"c{attempt}")) == (saved, b"m")
        kinds = {finding.kind for finding in await healthy.self_check()}
        assert kinds <= {"LEAKED_REFERENCE"}


async def _attempt(catalog: RedisCatalog, row: CheckpointRow, key: object) -> None:
    try:
        await catalog.put_checkpoint(row, b"m", 1, key)  # type: ignore[arg-type]
    except StoreUnavailableError:
        return


async def test_a_server_that_answers_nothing_is_given_up_in_time_and_found_again(server: RedisServerProcess) -> None:
    async with opened(server.url("timeout=0.3")) as catalog:
        await owned(catalog, "s")
        server.pause()
        with pytest.raises(StoreUnavailableError, match="no answer in time"):
            await catalog.append(AppendTokens(name("s"), 1, (1,), request=request("r")))
        server.resume()
        outcome = await catalog.append(AppendTokens(name("s"), 1, (1,), request=request("r")))
        assert outcome.head == 1


async def test_a_cancelled_call_gives_its_connection_up(server: RedisServerProcess) -> None:
    async with opened(server.url("connections=1")) as catalog:
        await owned(catalog, "s")
        server.pause()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await catalog.append(AppendTokens(name("s"), 1, (1, 2, 3)))
        server.resume()
        assert [row.name for row in await catalog.list_sessions("w", None, 10)] == [name("s")]


# --- the library ---------------------------------------------------------------------------------------------------
async def test_functions_that_were_lost_are_loaded_again(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        await owned(catalog, "s")
        server.command("FUNCTION", "FLUSH")
        await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1,)))
        server.command("FUNCTION", "FLUSH")
        (outcome,) = await catalog.commit_step([StepCommit(name("s"), 1, 1, (2,), "g")])
        assert outcome.status is StepStatus.COMMITTED
        server.command("FUNCTION", "FLUSH")
        assert (await catalog.read_log(name("s"), 0, 9)).token_ids == (1, 2)


async def test_libraries_of_two_versions_live_side_by_side(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        await owned(catalog, "s")
        other = source().replace(prefix(), "forkpoint_0123456789ab")
        server.command("FUNCTION", "LOAD", other)
        await catalog.append(AppendTokens(name("s"), 1, (1,)))
        assert server.command("FCALL_RO", "forkpoint_0123456789ab_lineage", 1, "nothing") == b"0"


# --- a full, lost or replaced server -------------------------------------------------------------------------------
async def test_a_server_out_of_memory_refuses_writes_whole_and_takes_them_again(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        await owned(catalog, "s")
        await catalog.append(AppendTokens(name("s"), 1, (1, 2)))
        server.command("CONFIG", "SET", "maxmemory", 1)
        for call in (
            catalog.append(AppendTokens(name("s"), 1, (3,), request=request("r"))),
            catalog.fork(ForkSessions(name("s"), None, (new("c"),))),
            catalog.create_workflow(WorkflowRow("other")),
        ):
            with pytest.raises(StoreFullError):
                await call
        assert (await catalog.read_log(name("s"), 0, 9)).token_ids == (1, 2)
        server.command("CONFIG", "SET", "maxmemory", 0)
        assert not (await catalog.append(AppendTokens(name("s"), 1, (3,), request=request("r")))).replayed
        assert await catalog.self_check() == []


async def test_what_was_acknowledged_outlives_a_kill(durable: RedisServerProcess) -> None:
    async with opened(durable.url("durability=local_fsync")) as catalog:
        assert catalog.durability is Durability.LOCAL_FSYNC
        await owned(catalog, "s")
        for index in range(50):
            await catalog.append(AppendTokens(name("s"), 1, (index,), request=request(f"r{index}")))
        durable.kill()
        with pytest.raises(StoreUnavailableError):
            await catalog.append(AppendTokens(name("s"), 1, (50,), request=request("r50")))
        await asyncio.to_thread(durable.start)
        assert (await catalog.append(AppendTokens(name("s"), 1, (49,), request=request("r49")))).replayed
        await catalog.append(AppendTokens(name("s"), 1, (50,), request=request("r50")))
        assert (await catalog.read_log(name("s"), 0, 99)).token_ids == tuple(range(51))
        assert await catalog.self_check() == []


async def test_a_tail_that_the_server_lost_is_data_loss_for_whoever_knew_it(durable: RedisServerProcess) -> None:
    async with opened(durable.url()) as catalog:
        await owned(catalog, "s")
        await owned(catalog, "gone")
        await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1, 2, 3)))
        saved = durable.folder.with_name(durable.folder.name + "-saved")
        durable.kill()
        shutil.copytree(durable.folder, saved)
        await asyncio.to_thread(durable.start)
        await catalog.commit_step([StepCommit(name("s"), 1, 3, (4,), "g")])
        await catalog.commit_step([StepCommit(name("s"), 1, 4, (5,), "g")])
        durable.kill()
        shutil.rmtree(durable.folder)
        shutil.move(saved, durable.folder)
        await asyncio.to_thread(durable.start)
        # The process that was told of five tokens says so, whatever it does next.
        for _ in range(2):
            with pytest.raises(LogTailMissingError) as lost:
                await catalog.commit_step([StepCommit(name("s"), 1, 5, (6,), "g")])
            assert (lost.value.client_position, lost.value.head) == (5, 3)
        # One that was not told learns it from its client.
        async with opened(durable.url()) as other:
            await other.commit_step([StepCommit(name("s"), 1, 3, (), "g", finish=FinishReason.STOP)])
            with pytest.raises(LogTailMissingError):
                await other.append(AppendTokens(name("s"), 1, (6,), expected_position=5))
            assert (await other.read_log(name("s"), 0, 9)).token_ids == (1, 2, 3)


async def test_an_emptied_server_is_no_new_store_for_who_knew_its_sessions(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        await owned(catalog, "s")
        await catalog.begin_generation(BeginGeneration(name("s"), 1, "g", PARAMS, (1, 2, 3)))
        server.command("FLUSHALL")
        with pytest.raises(LogTailMissingError):
            await catalog.commit_step([StepCommit(name("s"), 1, 3, (4,), "g")])


async def test_a_primary_that_became_a_replica_is_unavailable(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        await owned(catalog, "s")
        server.command("REPLICAOF", "127.0.0.1", 1)
        with pytest.raises(StoreUnavailableError):
            await catalog.append(AppendTokens(name("s"), 1, (1,)))
        server.command("REPLICAOF", "NO", "ONE")
        assert (await catalog.append(AppendTokens(name("s"), 1, (1,)))).head == 1


# --- damage --------------------------------------------------------------------------------------------------------
def log_of(server: RedisServerProcess) -> list[bytes]:
    """Keys of logs."""
    keys = server.command("KEYS", "*:log:*")
    assert isinstance(keys, list)
    return sorted(keys)


async def test_missing_foreign_altered_and_stray_records_are_found(server: RedisServerProcess) -> None:
    async with opened(server.url()) as catalog:
        for session in ("a", "b"):
            await owned(catalog, session)
            for index in range(6):
                await catalog.append(AppendTokens(name(session), 1, (index,) * 5))
        first, second = log_of(server)
        entries = server.command("XRANGE", first, "-", "+")
        assert isinstance(entries, list)
        assert [entry for entry, _ in entries] == [f"{5 * index}-1".encode() for index in range(6)]

        async def fails() -> None:
            with pytest.raises(LogCorruptError):
                await catalog.read_log(name("a"), 0, 100)
            kinds = [finding.kind async for finding in check(catalog, MemoryBlobs())]
            assert "DAMAGED_LOG" in kinds

        def write(changed: list[tuple[bytes, bytes]]) -> None:
            server.command("DEL", first)
            for entry, data in changed:
                server.command("XADD", first, entry, "r", data)

        records = [(entry, fields[b"r"]) for entry, fields in entries]
        for index in range(6):
            write(records[:index] + records[index + 1 :])
            await fails()
            damaged = bytearray(records[index][1])
            damaged[70] ^= 1
            write([*records[:index], (records[index][0], bytes(damaged)), *records[index + 1 :]])
            await fails()
        write([*records, (b"30-1", records[5][1])])
        await fails()
        with pytest.raises(LogCorruptError):
            await catalog.append(AppendTokens(name("a"), 1, (1,)))
        server.command("COPY", second, first, "REPLACE")
        await fails()
        write(records)
        assert (await catalog.append(AppendTokens(name("a"), 1, (1,)))).head == 31
