"""A real server in the test's process: gRPC on a port of 127.0.0.1, SQLite and files, over the hash engine."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
from google.rpc import error_details_pb2, status_pb2

from forkpoint.client.client import Client
from forkpoint.client.session import Session
from forkpoint.client.wire import Connection
from forkpoint.clock import SystemClock
from forkpoint.config import ServerConfig
from forkpoint.proto.forkpoint.v1 import session_pb2
from forkpoint.server.app import Parts, ServingNode, serving
from forkpoint.server.rpc.peerblobs import PeerBlobs
from forkpoint.statestore.open import open_blobs, open_catalog
from forkpoint.statestore.whole import is_whole
from tests.support.hash_engine import ByteCodec, HashEngine

ROOT = Path(__file__).resolve().parents[2]
DETAILS = {
    "google.rpc.ErrorInfo": error_details_pb2.ErrorInfo,
    "google.rpc.RetryInfo": error_details_pb2.RetryInfo,
    "google.rpc.BadRequest": error_details_pb2.BadRequest,
    "google.rpc.PreconditionFailure": error_details_pb2.PreconditionFailure,
    "google.rpc.QuotaFailure": error_details_pb2.QuotaFailure,
    "google.rpc.ResourceInfo": error_details_pb2.ResourceInfo,
}


def config_for(folder: Path, **settings: object) -> ServerConfig:
    """Settings of a small server on any free port."""
    return replace(ServerConfig(data=folder, port=0, checkpoint_every=32), **settings)  # type: ignore[arg-type]


def parts_for(config: ServerConfig, engine: HashEngine | None = None) -> Parts:
    """The stores that the config names, and a hash engine."""
    config.data.mkdir(parents=True, exist_ok=True)
    peers = PeerBlobs(is_whole, SystemClock())
    return Parts(
        open_catalog(config.catalog_url),
        open_blobs(config.blobs_url, sources=[peers]),
        engine or HashEngine(),
        ByteCodec(),
        peer_blobs=peers,
    )


@dataclass(frozen=True)
class Served:
    """A server, its engine, a client, and raw stubs."""

    running: ServingNode
    parts: Parts
    engine: HashEngine
    client: Client
    raw: Connection

    @property
    def address(self) -> str:
        return self.running.address

    async def session(self, session_id: str = "s", text: str = "") -> Session:
        """A session in workflow `w`, with some text when given."""
        session = await self.client.sessions.create("w", session_id, seed=7)
        if text:
            await session.append(text=text)
        return session


@asynccontextmanager
async def served(
    folder: Path,
    engine: HashEngine | None = None,
    parts: Parts | None = None,
    workflow: bool = True,
    **settings: object,
) -> AsyncIterator[Served]:
    """A server on the store in `folder`, with workflow `w`."""
    config = config_for(folder, **settings)
    engine = engine or HashEngine()
    parts = parts or parts_for(config, engine)
    async with serving(config, parts) as running, Client(running.address) as client:
        raw = Connection(running.address)
        try:
            if workflow:
                await client.workflows.create("w")
            yield Served(running, parts, engine, client, raw)
        finally:
            await raw.channel.close()


async def settled(session: Session) -> session_pb2.Session:
    """Wait until nothing goes on in the session; returns it."""
    async with asyncio.timeout(20):
        while True:
            now = await session.get()
            idle = now.state == session_pb2.Session.ACTIVE and now.consumed == now.head
            if idle or now.state in (session_pb2.Session.PAUSED, session_pb2.Session.DELETED):
                return now
            await asyncio.sleep(0.005)


class Refusal:
    """`async with Refusal(code, reason) as refusal:` expects the block to fail so, and keeps the details."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        self.code, self.reason = code, reason
        self.details: dict[str, object] = {}
        self.message = ""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert error is not None, f"expected {self.code.name}/{self.reason}, nothing was refused"
        if not isinstance(error, grpc.aio.AioRpcError):
            return False
        assert error.code() is self.code, f"{error.code()}: {error.details()}"
        data = next(value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin")
        assert isinstance(data, bytes)
        status = status_pb2.Status.FromString(data)
        self.message = status.message
        assert (status.code, status.message) == (self.code.value[0], error.details())
        for detail in status.details:
            name = detail.TypeName()
            assert name not in self.details, f"two details of type {name}"
            self.details[name] = DETAILS[name].FromString(detail.value)
        info = self.info
        assert (info.reason, info.domain) == (self.reason, "forkpoint"), info
        return True

    @property
    def info(self) -> error_details_pb2.ErrorInfo:
        """The ErrorInfo that every error carries."""
        info = self.details["google.rpc.ErrorInfo"]
        assert isinstance(info, error_details_pb2.ErrorInfo)
        return info

    @property
    def kinds(self) -> set[str]:
        """Short names of the details."""
        return {name.rpartition(".")[2] for name in self.details}


@dataclass
class ServerProcess:
    """A serving process of its own."""

    process: "subprocess.Popen[str]"
    address: str

    def kill(self) -> None:
        """SIGKILL, and wait."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """SIGTERM, and its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=15)

    def close(self) -> None:
        """Kill it if it still runs, and close its pipe."""
        if self.process.poll() is None:
            self.kill()
        if self.process.stdout is not None:
            self.process.stdout.close()


def start_server(folder: Path, port: int = 0, step_pause: float = 0.0) -> ServerProcess:
    """A process that runs tests/support/hash_server.py; returns once it serves."""
    port_file = folder / f"port-{os.urandom(4).hex()}"
    command = [
        sys.executable,
        "-m",
        "tests.support.hash_server",
        str(folder),
        str(port),
        str(step_pause),
        str(port_file),
    ]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert '"serving"' in line, f"the server did not start: {line!r}"
    return ServerProcess(process, port_file.read_text())


@contextmanager
def server_process(folder: Path, port: int = 0, step_pause: float = 0.0) -> Iterator[ServerProcess]:
    """As start_server; killed at the end of the block if it still runs."""
    server = start_server(folder, port, step_pause)
    try:
        yield server
    finally:
        server.close()
