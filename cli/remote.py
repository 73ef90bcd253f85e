"""What the verbs that talk to a server share: the address, the client, and how a session is shown."""

import argparse
import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Final

from forkpoint.client.client import Client

ADDRESS_DEFAULT: Final = "127.0.0.1:50061"
ADDRESS_VARIABLE: Final = "FORKPOINT_ADDRESS"
READY_SECONDS: Final = 3.0
"""How long a verb waits for a server that just starts."""


def add_remote(parser: argparse.ArgumentParser, with_json: bool = True) -> None:
    """Add `--address` and `--json`."""
    parser.add_argument(
        "--address",
        default=os.environ.get(ADDRESS_VARIABLE) or ADDRESS_DEFAULT,
        metavar="HOST:PORT",
        help="a server, or several of one cluster with commas between them, which stand in for each other "
        f"(default: ${ADDRESS_VARIABLE}, else {ADDRESS_DEFAULT})",
    )
    if with_json:
        parser.add_argument("--json", action="store_true", help="machine-readable output")


def call(
    arguments: argparse.Namespace,
    action: Callable[[Client, argparse.Namespace], Awaitable[int]],
    ready_s: float | None = READY_SECONDS,
) -> int:
    """Run `action` with a client of a server that serves within `ready_s` (None: don't ask)."""

    async def connected() -> int:
        async with Client(arguments.address.split(",")) as client:
            # A stream waits a minute for a server that dies under it. One that was never there is an error at once.
            if ready_s is not None:
                await client.ready(ready_s)
            return await action(client, arguments)

    return asyncio.run(connected())
