"""`forkpoint serve`: run a node until SIGTERM or Ctrl-C."""

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Final

from forkpoint.cli.load_bar import LoadBar
from forkpoint.config import DEVICES, DURABILITIES, ServerConfig, load_config

HELP: Final = {
    "model": "folder of the model (default: the tiny model that comes with Forkpoint)",
    "data": "folder for catalog, blobs and locks (default ./forkpoint-data)",
    "catalog": "URL of the catalog, such as sqlite:///path (default: SQLite in the data folder)",
    "blobs": "URL of the blob store, such as file:///path, or of several tiers, the fastest first, with blanks between "
    "(default: files in the data folder)",
    "compress": "store blobs compressed where that pays (default yes)",
    "namespace": "prefix of the store's keys (default 'default')",
    "host": "address to listen on (default 127.0.0.1: this machine only)",
    "port": "port to listen on, 0 for any free one (default 50061)",
    "advertise": "HOST:PORT that other nodes and clients are told (default: where it listens)",
    "port_file": "written with HOST:PORT once the node serves",
    "node": "this node's name among those that share the store (default 'node')",
    "slots": "sessions that may be in memory at once (default 16)",
    "pages": "pages of 64 tokens in memory (default 2048)",
    "threads": "CPU threads of a product; part of the numerics id (default 2)",
    "device": f"one of {', '.join(DEVICES)} (default cpu)",
    "cuda_graphs": "on a GPU, record and replay steps whose shapes come again (default yes)",
    "checkpoint_every": "tokens between checkpoints of sessions that say nothing, 0 for none (default 512)",
    "checkpoint_on_turn_end": "also checkpoint when a generation ends",
    "keep_last": "newest checkpoints of a session that stay, for sessions that say nothing (default 3)",
    "ladder_step": "of older checkpoints one every so many tokens stays, ever fewer further back, 0 for none "
    "(default 4096)",
    "gc_interval_seconds": "seconds between garbage collections, 0 for none by itself (default 300)",
    "gc_grace_seconds": "seconds for which a blob that no checkpoint names is left alone (default 600)",
    "gc_budget_bytes": "bytes a tier of blobs may hold before checkpoints go that no session needs, 0 for any amount "
    "(default 0)",
    "prefill_chunk": "prompt tokens a step may consume (default 512)",
    "stream_age_seconds": "seconds after which a stream's client is asked to open it again, 0 for never (default 3600)",
    "stall_seconds": "seconds after which a node whose work stands still gives up its sessions, 0 for never "
    "(default 60)",
    "durability": f"the least the store must reach: {', '.join(DURABILITIES)} (default local_fsync)",
    "sabotage": "damage what is restored, for the demo's self-test: conv-tail",
}
_YES_OR_NO: Final = frozenset({"checkpoint_on_turn_end", "compress", "cuda_graphs"})
NAMES: Final = tuple(field.name for field in fields(ServerConfig))


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `serve`; a flag for every setting. Values are checked with the settings, not here."""
    parser = verbs.add_parser(
        "serve",
        help="run a node",
        epilog="Each flag is also a key of the table [server] of a TOML file (--config) and an environment variable "
        "FORKPOINT_NAME; flags win over the environment, the environment over the file.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file (default: $FORKPOINT_CONFIG)")
    parser.add_argument("--address", metavar="HOST:PORT", help="--host and --port in one")
    for name in NAMES:
        flag = f"--{name.replace('_', '-')}"
        if name in _YES_OR_NO:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=HELP.get(name))
        else:
            parser.add_argument(flag, default=None, metavar=name.upper().replace("_", "-"), help=HELP.get(name))
    parser.set_defaults(run=run)


def settings(arguments: argparse.Namespace) -> ServerConfig:
    """The settings from file, environment and flags. Raises ConfigError."""
    flags = {name: getattr(arguments, name) for name in NAMES}
    if arguments.address is not None:
        flags["host"], _, flags["port"] = arguments.address.rpartition(":")
    return load_config(flags, file=arguments.config)


def run(arguments: argparse.Namespace) -> int:
    """Serve; returns the exit status of the node."""
    config = settings(arguments)
    # Late, so that no other verb pays for torch.
    from forkpoint.server.main import serve

    if not sys.stderr.isatty():
        return serve(config)
    with LoadBar() as bar:
        return serve(config, bar)
