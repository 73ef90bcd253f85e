"""The tiny model's sessions through SIGTERM, SIGKILL, damaged blobs and another store: equal to sessions left alone."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from forkpoint.client.client import Client
from forkpoint.client.generation import Generation
from forkpoint.client.session import Session
from forkpoint.limits import SHUTDOWN_SECONDS, TILE_TOKENS
from forkpoint.proto.forkpoint.v1 import common_pb2
from tests.support.stores import check_store
from tests.support.tiny_site import SOURCE, log, parts, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")


def writing(session: Session, max_tokens: int = 30) -> Generation:
    """A sampled generation; the same for every session of the same seed and past."""
    return session.generate(text=b"def g(x):\n", max_tokens=max_tokens, temperature=0.9)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def quiet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    """A client of a server on a store of its own, to which nothing happens."""
    async with serving(tmp_path_factory.mktemp("quiet"), "quiet") as server, Client(server.address) as client:
        await client.workflows.create("w")
        yield client


async def test_sigterm_in_the_middle_of_a_prefill_and_of_generations_with_too_few_slots(
    tmp_path: Path, quiet: Client
) -> None:
    """Five sessions on three slots: one reads a long prompt, two generate, two are idle."""
    tokens = {"s0": 200, "s1": 300, "s2": 1600, "s3": 0, "s4": 0}
    async with serving(tmp_path, "node", "--slots", "3") as server, Client(server.address) as client:
        await client.workflows.create("w")
        sessions = [await client.sessions.create("w", name, seed=5, every_tokens=256) for name in tokens]
        long, busy = sessions[2], sessions[3:]
        for session in sessions[:2]:
            await session.append(text=SOURCE[: tokens[session.name[-2:]]])
        running = [writing(session, 60) for session in busy]
        async with asyncio.TaskGroup() as group:
            for one in running:
                group.create_task(one.result())
            while not all(len(one.token_ids) > 3 for one in running):
                await asyncio.sleep(0.02)
            await long.append(text=SOURCE[: tokens["s2"]])
            while not 0 < (seen := (await long.get()).consumed) < tokens["s2"]:
                await asyncio.sleep(0.01)
            assert await server.stop(SHUTDOWN_SECONDS) == 0
            assert all(one.finished is None for one in running)
            await server.start()
            await client.ready()
            resumed = await long.resume()
            assert resumed.restored_tokens >= seen // TILE_TOKENS * TILE_TOKENS > 0, (
                "what was read of the long prompt was checkpointed"
            )
            assert resumed.restored_tokens + resumed.replayed_tokens == tokens["s2"]
        assert all(len(one.token_ids) == 60 and one.reconnects for one in running)
        ours = [(await log(session), await parts(session)) for session in sessions]
        twins = [await quiet.sessions.create("w", name, seed=5) for name in tokens]
        for twin in twins[:3]:
            await twin.append(text=SOURCE[: tokens[twin.name[-2:]]])
        await asyncio.gather(*(writing(twin, 60).result() for twin in twins[3:]))
        assert [(await log(twin), await parts(twin)) for twin in twins] == ours
        assert await server.stop() == 0
    assert await check_store(tmp_path / "store") == []


def blobs(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in (folder / "store" / "blobs").rglob("*") if path.is_file()}


def flip_a_byte(folder: Path, digest: str) -> None:
    path = next(path for name, path in blobs(folder).items() if digest.endswith(name) or name in digest)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.chmod(0o600)
    path.write_bytes(data)


async def test_damaged_and_missing_blobs_cost_a_longer_replay_and_change_no_bit(tmp_path: Path, quiet: Client) -> None:
    async with serving(tmp_path) as server, Client(server.address) as client:
        await client.workflows.create("w")
        session = await client.sessions.create("w", "s", seed=5, every_tokens=0)
        grids, digests = list[int](), list[list[str]]()
        for cut in range(0, 900, 300):
            await session.append(text=SOURCE[cut : cut + 300])
            taken = await session.checkpoint()
            grids.append(taken.grid_position)
            digests.append([part.blake3 for part in taken.parts if part.name.startswith("kda")])
        assert grids == [at // TILE_TOKENS * TILE_TOKENS for at in (300, 600, 900)]
        await server.kill()
        flip_a_byte(tmp_path, digests[2][7])
        flip_a_byte(tmp_path, digests[1][0])
        await server.start()
        await client.ready()
        resumed = await session.resume()
        assert (resumed.restored_tokens, resumed.replayed_tokens) == (grids[0], 900 - grids[0])
        await server.kill()
        for path in blobs(tmp_path).values():
            path.unlink()
        await server.start()
        await client.ready()
        resumed = await session.resume()
        assert (resumed.restored_tokens, resumed.replayed_tokens, resumed.exact) == (0, 900, True)
        await writing(session).result()
        twin = await quiet.sessions.create("w", "damaged", seed=5)
        await twin.append(text=SOURCE[:900])
        await writing(twin).result()
        assert (await log(twin), await parts(twin)) == (await log(session), await parts(session))


async def test_a_stop_across_a_kill_is_found_and_a_late_reader_gets_all_of_it(tmp_path: Path) -> None:
    """The server dies between the bytes of the stop string; the stream's text is that of an undisturbed run."""
    prompt = [("user", "continue")]
    async with serving(tmp_path) as server, Client(server.address) as client:
        await client.workflows.create("w")
        session = await client.sessions.create("w", "s", seed=5, every_tokens=16)
        await session.append(text=SOURCE[:500])
        (probe,) = await session.fork(session_ids=["probe"])
        whole = await probe.generate(messages=prompt, add_generation_prompt=True, max_tokens=48).result()
        assert len(whole.token_ids) == 48, "the model says enough to stop it in"
        stop, at = next(
            (text, start)
            for start in range(20, 40)
            if whole.text.find(text := whole.text[start : start + 6]) == start and len(text) == 6
        )
        running = session.generate(
            messages=prompt, add_generation_prompt=True, max_tokens=300, stop_text=[stop], request_id="stopped"
        )
        async for _ in running:
            if at + 2 <= len(running.token_ids) < at + 5:
                break
        assert running.finished is None
        assert running.text == whole.text[:at], "the beginning of a stop string is held back"
        await server.kill()
        await server.start()
        await client.ready()
        await running.result()
        assert running.finished is not None and running.started is not None
        end, start = running.finished.head, running.started.start
        assert (running.finished.reason, running.text) == (common_pb2.STOP, whole.text[:at])
        assert (running.finished.stop_position, end) == (start + at, start + at + 6)
        assert running.token_ids == whole.token_ids[: at + 6]
        await server.kill()
        await server.start()
        await client.ready()
        for position in (start, start + 1, start + at, start + at + 3, end):
            late = await session.generate(
                messages=prompt,
                add_generation_prompt=True,
                max_tokens=300,
                stop_text=[stop],
                request_id="stopped",
                resume_position=position,
            ).result()
            assert late.finished == running.finished
            assert late.token_ids == running.token_ids[position - start :]
            assert running.text.endswith(late.text) and len(late.text) == max(0, at - (position - start))
        assert (await session.get()).head == end


async def test_an_exported_session_goes_on_in_another_store_as_it_does_at_home(tmp_path: Path, quiet: Client) -> None:
    async with serving(tmp_path) as server, Client(server.address) as client:
        await client.workflows.create("w")
        session = await client.sessions.create("w", "s", seed=5, every_tokens=64, labels={"kind": "demo"})
        await session.append(text=SOURCE[:700])
        first = await session.generate(text=b"def h(x):\n", max_tokens=40, temperature=0.9, logprobs=True).result()
        assert len(first.logprobs) == 40
        await session.append(messages=[("user", "go on")], add_generation_prompt=True)
        copy = await quiet.sessions.import_("w", session.export(), "copy")
        here, there = await session.get(), await copy.get()
        assert (here.head, here.head_hash, dict(here.labels)) == (there.head, there.head_hash, dict(there.labels))
        results = [await writing(one).result() for one in (session, copy)]
        assert results[0].token_ids == results[1].token_ids and len(results[0].token_ids) == 30
        assert await log(session) == await log(copy)
        assert await parts(session) == await parts(copy)
        again = [chunk async for chunk in copy.export()]
        once = [chunk async for chunk in session.export()]
        assert [chunk.slice for chunk in again if chunk.HasField("slice")] == [
            chunk.slice for chunk in once if chunk.HasField("slice")
        ], "tokens, kinds and logprobs"
        with pytest.raises(Exception, match="ALREADY_EXISTS"):
            await quiet.sessions.import_("w", session.export(), "copy")
