"""`forkpoint migrate`: move a session to another node while it runs."""

import argparse
from typing import Any

from forkpoint.cli.names import session_name, short
from forkpoint.cli.output import fail, print_json_line
from forkpoint.cli.remote import add_remote, call
from forkpoint.cli.shown import enum_name, session_dict
from forkpoint.client.client import Client


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `migrate`."""
    parser = verbs.add_parser(
        "migrate",
        help="move a session to another node while it runs",
        epilog="Streams of its tokens go on. Ctrl-C leaves the session where it is, unless it has just moved.",
    )
    parser.add_argument("session", help="W/S")
    parser.add_argument("--to", metavar="NODE", default="", help="default: the node with the most room")
    add_remote(parser)
    parser.set_defaults(run=lambda arguments: call(arguments, _migrate))


async def _migrate(client: Client, arguments: argparse.Namespace) -> int:
    name = session_name(arguments.session)
    phase, moved = "", False
    async with client.sessions.open(name).migrate(arguments.to) as events:
        async for event in events:
            moved = event.HasField("session")
            if arguments.json:
                print_json_line(_dict(event))
            elif moved or enum_name(event, "phase") != phase:
                print(_line(short(name), event), flush=True)
            phase = enum_name(event, "phase")
    return 0 if moved else fail("MOVE_FAILED", f"the call ended before {short(name)} had moved")


def _dict(event: Any) -> dict[str, object]:
    return {
        "phase": enum_name(event, "phase"),
        "target_node": event.target_node,
        "restored_tokens": event.restored_tokens,
        "lag_tokens": event.lag_tokens,
        "pause_s": event.pause.ToNanoseconds() / 1e9 if event.HasField("pause") else None,
        "session": session_dict(event.session) if event.HasField("session") else None,
    }


def _line(name: str, event: Any) -> str:
    target = event.target_node.removeprefix("nodes/")
    if not event.HasField("session"):
        what = enum_name(event, "phase").lower().replace("_", " ")
        return f"{name}: {what} on {target}, {event.restored_tokens:,} tokens restored, {event.lag_tokens:,} behind"
    pause = f", no token for {event.pause.ToNanoseconds() / 1e6:,.1f} ms" if event.HasField("pause") else ""
    return f"{name}: on {event.session.node.removeprefix('nodes/')}{pause}"
