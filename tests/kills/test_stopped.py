"""An owner that stands still (SIGSTOP, as a frozen machine does) while a rival wants its session."""

import asyncio
import os
import signal
from pathlib import Path

import grpc

from forkpoint.cli.demo.server import ServerProcess
from forkpoint.client.client import Client
from forkpoint.client.generation import Generation
from forkpoint.client.wire import Connection
from forkpoint.limits import LEASE_SKEW_SECONDS, LEASE_TTL_SECONDS
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from tests.support.stores import check_store
from tests.support.talkers import Talker, open_talkers

STANDSTILL_SECONDS = LEASE_TTL_SECONDS + LEASE_SKEW_SECONDS + 2.0
TOKENS = 200


def long_generation(talker: Talker) -> Generation:
    return talker.session.generate(text=b"def f", max_tokens=TOKENS, temperature=1.0, request_id="long")


async def grab(server: ServerProcess, name: str) -> bool:
    """Ask one node again and again for the session, longer than a lease lives; whether it got it."""
    direct = Connection(server.address)
    try:
        async with asyncio.timeout(STANDSTILL_SECONDS):
            while True:
                try:
                    await direct.sessions.Resume(pb.ResumeRequest(name=name, request_id="grab"), timeout=60)
                    return True
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.25)
    except TimeoutError:
        return False
    finally:
        await direct.channel.close()


async def undisturbed(folder: Path) -> list[int]:
    server = ServerProcess("quiet", folder / "quiet", folder / "quiet.log")
    await server.start()
    try:
        async with Client(server.address) as client:
            (talker,) = await open_talkers(client, 1, every_tokens=0)
            await long_generation(talker).result()
            return (await talker.log())[0]
    finally:
        await server.kill()


async def test_an_owner_that_stood_still_and_its_rival_leave_one_history(tmp_path: Path) -> None:
    """Whether the rival gets the session or not, both readers see one history, and it is the undisturbed one."""
    first = ServerProcess("first", tmp_path / "store", tmp_path / "first.log")
    second = ServerProcess("second", tmp_path / "store", tmp_path / "second.log")
    await first.start()
    await second.start()
    try:
        async with Client([first.address, second.address], patience_s=90) as client, Client(second.address) as rival:
            (talker,) = await open_talkers(client, 1, every_tokens=64)
            generation = long_generation(talker)
            async for _ in generation:
                if len(generation.token_ids) >= 8:
                    break
            os.kill(first.pid, signal.SIGSTOP)
            try:
                await grab(second, talker.session.name)
            finally:
                os.kill(first.pid, signal.SIGCONT)
            attached = long_generation(Talker(rival.sessions.open(talker.session.name)))
            await asyncio.gather(generation.result(), attached.result())
            assert generation.token_ids == attached.token_ids and len(generation.token_ids) == TOKENS
            log, _ = await talker.log()
            assert log[-TOKENS:] == generation.token_ids
        assert await first.stop() == 0
        assert await second.stop() == 0
        assert await check_store(tmp_path / "store") == []
        assert log == await undisturbed(tmp_path)
    finally:
        for server in (first, second):
            if server.running:
                await server.kill()
