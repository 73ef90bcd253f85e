"""Two servers on one store, a server that is told to stop, one with another model, one whose disk is full."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from forkpoint.cli.demo.server import ServerFailedError, ServerProcess
from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError, remote_error
from forkpoint.client.generation import Generation
from forkpoint.client.wire import Connection
from forkpoint.limits import SHUTDOWN_SECONDS, TILE_TOKENS
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.statestore.open import open_catalog, read_marker
from tests.support.rpc_nodes import DIRECTLY
from tests.support.small_disk import SmallDisk
from tests.support.stores import catalog_url, check_store
from tests.support.talkers import Talker, open_talkers

TINY = Path(__file__).resolve().parents[2] / "model" / "tiny"


@pytest.fixture
async def first(tmp_path: Path) -> AsyncIterator[ServerProcess]:
    server = ServerProcess("first", tmp_path / "store", tmp_path / "first.log")
    await server.start()
    yield server
    if server.running:
        await server.kill()


@pytest.fixture
async def second(tmp_path: Path, first: ServerProcess) -> AsyncIterator[ServerProcess]:
    server = ServerProcess("second", tmp_path / "store", tmp_path / "second.log")
    await server.start()
    yield server
    if server.running:
        await server.kill()


async def refused(call: Any) -> RemoteError:
    """The error of a call that is sent to one node only."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return remote_error(caught.value)


async def test_a_second_server_that_takes_a_live_session_is_told_where_it_lives(
    first: ServerProcess, second: ServerProcess
) -> None:
    async with Client(first.address) as client:
        await client.workflows.create("w")
        session = await client.sessions.create("w", "s", seed=1)
        await session.append(text=b"x = 1\n")
    direct = Connection(second.address)
    try:
        errors = [
            await refused(
                direct.sessions.Append(pb.AppendRequest(name=session.name, text_utf8=b"y"), metadata=DIRECTLY)
            ),
            await refused(direct.sessions.Resume(pb.ResumeRequest(name=session.name), metadata=DIRECTLY)),
            await refused(direct.sessions.Rewind(pb.RewindRequest(name=session.name, position=1), metadata=DIRECTLY)),
        ]
    finally:
        await direct.channel.close()
    for error in errors:
        assert (error.code, error.reason) == ("UNAVAILABLE", "SESSION_RELOCATING")
        assert error.metadata["address"] == first.address
    async with Client(second.address) as client:
        # Without that the call is sent on.
        appended = await client.sessions.open(session.name).append(text=b"y = 2\n")
        assert appended.start == 6


async def test_a_second_server_takes_the_sessions_of_one_that_was_killed(
    first: ServerProcess, second: ServerProcess
) -> None:
    async with Client([first.address, second.address]) as client:
        await client.workflows.create("w")
        session = await client.sessions.create("w", "s", seed=1)
        generation = session.generate(
            messages=[("user", "continue")], add_generation_prompt=True, max_tokens=120, temperature=1.0, seed=5
        )
        async for _ in generation:
            if len(generation.token_ids) >= 8:
                break
        assert generation.finished is None
        await first.kill()
        await generation.result()
        assert generation.reconnects and (await session.get()).node == "nodes/second"
        reader = await session.tokens(generation.started.start if generation.started else 0).result()
        assert reader.token_ids == generation.token_ids


async def test_a_stopped_server_exits_with_0_and_leaves_every_session_checkpointed(
    tmp_path: Path, first: ServerProcess
) -> None:
    async with Client(first.address) as client:
        talkers = await open_talkers(client, 3, every_tokens=0)
        await asyncio.gather(*(talker.turn() for talker in talkers))
        open_ended = [
            talker.session.generate(text=b"def ", max_tokens=400, temperature=1.0, seed=n)
            for n, talker in enumerate(talkers)
        ]
        async with asyncio.TaskGroup() as group:
            for generation in open_ended:
                group.create_task(generation.result())
            while not all(len(generation.token_ids) >= 8 for generation in open_ended):
                await asyncio.sleep(0.02)
            assert await first.stop(SHUTDOWN_SECONDS) == 0
            await assert_checkpointed(tmp_path / "store")
            await first.start()
        for talker, generation in zip(talkers, open_ended, strict=True):
            assert generation.reconnects
            ids, _ = await talker.log()
            assert ids[-len(generation.token_ids) :] == generation.token_ids


async def assert_checkpointed(folder: Path) -> None:
    """The newest checkpoint of each session lies at the last grid point of what the model has consumed."""
    marker = read_marker(catalog_url(folder))
    assert marker is not None
    catalog = open_catalog(catalog_url(folder))
    await catalog.open(marker)
    try:
        rows = await catalog.list_sessions(None, None, 100)
        assert len(rows) >= 3
        for row in rows:
            assert row.owner == ""
            newest = max((c.grid_position for c in await catalog.list_checkpoints(row.name)), default=0)
            # The last sampled token is committed and not consumed yet.
            assert newest >= (row.head - 1) // TILE_TOKENS * TILE_TOKENS, f"{row.name}: {newest} of {row.head}"
    finally:
        await catalog.close()


async def test_a_store_refuses_a_server_with_another_model(tmp_path: Path, first: ServerProcess) -> None:
    await first.stop()
    other = tmp_path / "other-model"
    other.mkdir()
    for name in ("config.json", "tokenizer_config.json", "model.safetensors"):
        shutil.copy(TINY / name, other / name)
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (other / "model.safetensors").write_bytes(weights)
    server = ServerProcess("other", tmp_path / "store", tmp_path / "other.log", ("--model", str(other)))
    with pytest.raises(ServerFailedError, match="error: STATE_INCOMPATIBLE: "):
        await server.start()
    assert await server.stop() == 1
    await first.start()
    assert await first.stop() == 0


async def append_until_refused(talker: Talker) -> tuple[RemoteError, str]:
    """Append until the store has no room; returns the refusal and the refused call's request id."""
    for number in range(100):
        request_id = f"fill-{number}"
        try:
            added = await talker.session.append(text=b"0123456789abcdef" * 4, request_id=request_id)
        except RemoteError as error:
            return error, request_id
        talker.saw(added.start, list(added.token_ids))
    raise AssertionError("the disk never got full")


async def test_a_full_disk_refuses_clearly_and_loses_nothing(tmp_path: Path, small_disk: SmallDisk) -> None:
    server = ServerProcess("full", small_disk.folder / "store", tmp_path / "full.log")
    await server.start()
    try:
        async with Client(server.address) as client:
            writer, appender = await open_talkers(client, 2, every_tokens=64)
            await writer.turn()
            generation = writer.session.generate(text=b"def f", max_tokens=300, temperature=1.0, request_id="long")
            async for _ in generation:
                if len(generation.token_ids) >= 8:
                    break
            await asyncio.to_thread(small_disk.fill)
            error, request_id = await append_until_refused(appender)
            assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "STORE_FULL")
            refusals = [await refusal(generation), await refusal(appender.session.checkpoint())]
            assert {refused.reason for refused in refusals} == {"STORE_FULL"}
            assert generation.finished is None
            await asyncio.to_thread(small_disk.free)
            added = await appender.session.append(text=b"0123456789abcdef" * 4, request_id=request_id)
            appender.saw(added.start, list(added.token_ids))
            again = await writer.session.generate(
                text=b"def f", max_tokens=300, temperature=1.0, request_id="long"
            ).result()
            assert again.token_ids[: len(generation.token_ids)] == generation.token_ids
            assert (await appender.session.checkpoint()).grid_position > 0
            logs = {talker.short: (await talker.log())[0] for talker in (writer, appender)}
        await server.kill()
        await server.start()
        async with Client(server.address) as client:
            for talker in (writer, appender):
                reader = await client.sessions.open(talker.session.name).tokens().result()
                assert reader.token_ids == logs[talker.short]
                talker.check(reader.token_ids, talker.seen)
        assert await server.stop(SHUTDOWN_SECONDS) == 0
        assert await check_store(small_disk.folder / "store") == []
    finally:
        if server.running:
            await server.kill()


async def refusal(call: Any) -> RemoteError:
    """The error of a call, or of a stream read to its end."""
    with pytest.raises(RemoteError) as caught:
        await (call.result() if isinstance(call, Generation) else call)
    return caught.value
