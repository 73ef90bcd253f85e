"""A store that broke for good ends its process, so that others go on; a full disk ends nothing."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.wire import Connection
from forkpoint.server.engine.batch import Sample
from tests.support.hash_engine import continuation
from tests.support.rpc_site import ROOT, served

GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextmanager
def failing_server(what: str, folder: Path, log: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """A process of tests/support/failing_server.py and its address; its log goes to `log`."""
    port_file = folder.parent / "port"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.failing_server", what, str(folder), str(port_file)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            assert process.stdout is not None and '"serving"' in process.stdout.readline(), log.read_text()
            yield process, port_file.read_text()
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def health(channel: grpc.aio.Channel, method: str) -> Any:
    make = channel.unary_unary if method == "Check" else channel.unary_stream
    return make(
        f"/grpc.health.v1.Health/{method}",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )(health_pb2.HealthCheckRequest())


@pytest.mark.parametrize("what", ["catalog", "blobs"])
async def test_a_store_that_broke_for_good_ends_its_process_and_another_one_goes_on(what: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with failing_server(what, tmp_path / "data", log) as (process, address):
        raw = Connection(address)
        async with asyncio.timeout(30), Client(address) as client:
            await client.workflows.create("w")
            session = await client.sessions.create("w", "s", seed=7)
            await session.append(text="hello")
            watch = health(raw.channel, "Watch")
            assert (await watch.read()).status == SERVING
            generation = session.generate(max_tokens=1500, request_id="g", patience_s=0.1)
            await anext(generation)
            process.send_signal(signal.SIGUSR1)
            assert (await watch.read()).status == NOT_SERVING
            with pytest.raises(RemoteError) as error:
                await generation.result()
            assert error.value.code == "UNAVAILABLE"
            assert await asyncio.to_thread(process.wait, 15) == 1
        await raw.channel.close()
    lines = [line for line in log.read_text().splitlines() if "broke for good" in line]
    assert len(lines) == 1 and f'"store": "{what}"' in lines[0]
    async with asyncio.timeout(60), served(tmp_path / "data", workflow=False) as site:
        again = site.client.sessions.open(session.name).generate(max_tokens=1500, request_id="g")
        assert (await again.result()).token_ids == continuation(b"hello", 1500, GREEDY)[0]


async def test_a_full_disk_ends_no_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with failing_server("full", tmp_path / "data", log) as (process, address):
        raw = Connection(address)
        async with asyncio.timeout(30), Client(address) as client:
            await client.workflows.create("w")
            session = await client.sessions.create("w", "s", seed=7)
            process.send_signal(signal.SIGUSR1)
            with pytest.raises(RemoteError) as error:
                while True:
                    await session.append(text="x")
            assert (error.value.code, error.value.reason) == ("RESOURCE_EXHAUSTED", "STORE_FULL")
            await asyncio.sleep(0.5)
            assert (await health(raw.channel, "Check")).status == SERVING
            process.send_signal(signal.SIGUSR2)
            async with asyncio.timeout(10):
                while True:
                    try:
                        await session.append(text="y")
                        break
                    except RemoteError:
                        await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 15) == 0
        await raw.channel.close()
    assert "broke for good" not in log.read_text()
