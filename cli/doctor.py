"""`forkpoint doctor`: versions and settings of this installation, and whether a server serves."""

import argparse
import os
import platform
from importlib import metadata
from typing import Final

from forkpoint import __version__
from forkpoint.cli.output import fail, print_fields, print_json
from forkpoint.cli.remote import add_remote, call
from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError

PACKAGES: Final = ("torch", "numpy", "safetensors", "apsw", "blake3", "zstandard", "grpcio", "protobuf", "triton")


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `doctor`."""
    parser = verbs.add_parser("doctor", help="versions of this installation, and whether a server serves")
    parser.add_argument("--server", action="store_true", help="only ask the server; exit 1 when it does not serve")
    add_remote(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found."""
    if arguments.server:
        return call(arguments, _ask, ready_s=None)
    facts = installation()
    if arguments.json:
        print_json(facts)
    else:
        print_fields(facts)
    return 0


def installation() -> dict[str, object]:
    """Facts that a bug report needs."""
    facts: dict[str, object] = {
        "forkpoint": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count() or 0,
    }
    for name in PACKAGES:
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = "not installed"
    return facts


async def _ask(client: Client, arguments: argparse.Namespace) -> int:
    try:
        await client.ready(timeout_s=0)
    except RemoteError as error:
        return fail("NOT_SERVING", f"{arguments.address}: {error.message}")
    print(f"{arguments.address} serves")
    return 0
