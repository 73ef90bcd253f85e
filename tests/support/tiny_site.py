"""`forkpoint serve` as a process of its own, with the real tiny model, and what tests ask of it."""

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from forkpoint.cli.demo.server import ServerProcess
from forkpoint.client.errors import RemoteError, remote_error
from forkpoint.client.session import Session

SOURCE = "".join(
    f"def f{number}(value):\n    total = value * {number}\n    return total + {number % 7}\n\n\n"
    for number in range(400)
).encode()
"""Text of the kind that the model was trained on; 25,000 bytes, so as many tokens."""


@asynccontextmanager
async def serving(folder: Path, name: str = "node", *extra: str) -> AsyncIterator[ServerProcess]:
    """A started server on the store `folder`/store; killed at the end if it still runs."""
    server = ServerProcess(name, folder / "store", folder / f"{name}.log", extra)
    await server.start()
    try:
        yield server
    finally:
        if server.running:
            await server.kill()


async def refused(call: Awaitable[object], code: str, reason: str) -> RemoteError:
    """The refusal of a call, which must be this one."""
    try:
        await call
    except RemoteError as error:
        refusal = error
    except grpc.aio.AioRpcError as failure:
        refusal = remote_error(failure)
    else:
        pytest.fail(f"expected {code}/{reason}, nothing was refused")
    assert (refusal.code, refusal.reason) == (code, reason), refusal
    return refusal


async def drained(call: Any) -> list[Any]:
    """All messages of a raw stream."""
    return [message async for message in call]


async def parts(session: Session) -> dict[str, str]:
    """Part -> digest of the session's state at its head."""
    return {part.name: part.blake3 for part in (await session.checkpoint()).parts}


async def log(session: Session) -> list[int]:
    """Token ids of the whole log."""
    return (await session.tokens().result()).token_ids
