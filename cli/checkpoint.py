"""`forkpoint checkpoint …`: take, look at, verify and delete checkpoints."""

import argparse

from forkpoint.cli.names import checkpoint_name, session_name, short
from forkpoint.cli.output import bytes_text, print_json, print_table
from forkpoint.cli.remote import add_remote, call
from forkpoint.cli.session_calls import Action
from forkpoint.cli.shown import checkpoint_dict
from forkpoint.client.client import Client


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `checkpoint` and its sub-verbs."""
    parser = verbs.add_parser("checkpoint", help="create, list, show, verify and delete checkpoints")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="checkpoint a session at its head; durable when it returns")
    create.add_argument("session", help="W/S")
    create.add_argument("--id", default="", metavar="C", help="the checkpoint's id (default: drawn)")
    create.add_argument("--ttl", type=float, metavar="SECONDS", help="kept for so long (default: until it is deleted)")
    _finish(create, _create)
    listing = actions.add_parser("list", help="checkpoints of a session")
    listing.add_argument("session", help="W/S")
    _finish(listing, _list)
    show = actions.add_parser("show", help="one checkpoint with its parts")
    show.add_argument("checkpoint", help="W/S/C")
    _finish(show, _show)
    verify = actions.add_parser("verify", help="read every part and compare its digest; exit 1 when one is damaged")
    verify.add_argument("checkpoint", help="W/S/C")
    _finish(verify, _verify)
    delete = actions.add_parser("delete", help="give a checkpoint up; its state is collected later")
    delete.add_argument("checkpoint", help="W/S/C")
    _finish(delete, _delete)


def _finish(parser: argparse.ArgumentParser, action: Action) -> None:
    add_remote(parser)
    parser.set_defaults(run=lambda arguments: call(arguments, action))


async def _create(client: Client, arguments: argparse.Namespace) -> int:
    checkpoint = await client.sessions.open(session_name(arguments.session)).checkpoint(
        arguments.id, ttl_s=arguments.ttl
    )
    if arguments.json:
        print_json(checkpoint_dict(checkpoint, with_parts=True))
    else:
        print(
            f"{short(checkpoint.name)}: position {checkpoint.position:,}, state at {checkpoint.grid_position:,}, "
            f"{len(checkpoint.parts)} parts, {bytes_text(checkpoint.bytes_stored)} stored, "
            f"{bytes_text(checkpoint.bytes_shared)} shared"
        )
    return 0


async def _list(client: Client, arguments: argparse.Namespace) -> int:
    found = [
        checkpoint_dict(checkpoint, with_parts=False)
        async for checkpoint in client.checkpoints.list(session_name(arguments.session))
    ]
    if arguments.json:
        print_json(found)
    else:
        rows = [
            (
                short(c["name"]),
                c["position"],
                c["grid_position"],
                c["parts"],
                c["bytes_total"],
                "automatic" if c["automatic"] else "asked for",
                "exact" if c["exact"] else "not exact",
                c["create_time"],
            )
            for c in found
        ]
        print_table(("checkpoint", "position", "state at", "parts", "bytes", "", "", "created"), rows)
    return 0


async def _show(client: Client, arguments: argparse.Namespace) -> int:
    shown = checkpoint_dict(await client.checkpoints.get(checkpoint_name(arguments.checkpoint)), with_parts=True)
    if arguments.json:
        print_json(shown)
    else:
        rows = [(part["name"], part["bytes"], part["blake3"]) for part in shown["parts"]]
        print_table(("part", "bytes", "blake3"), rows, f"{short(shown['name'])}: state at {shown['grid_position']:,}")
    return 0


async def _verify(client: Client, arguments: argparse.Namespace) -> int:
    damaged: list[dict[str, object]] = []
    checked = size = 0
    async for event in client.checkpoints.verify(checkpoint_name(arguments.checkpoint)):
        if event.WhichOneof("event") == "result":
            checked, size = event.result.parts_checked, event.result.bytes_checked
        elif event.part.problem:
            damaged.append(
                {"name": event.part.part.name, "blake3": event.part.part.blake3, "problem": event.part.problem}
            )
    if arguments.json:
        print_json({"parts_checked": checked, "bytes_checked": size, "damaged": damaged})
    else:
        if damaged:
            print_table(("part", "blake3", "problem"), [tuple(part.values()) for part in damaged])
        print(f"{checked} parts checked, {len(damaged)} damaged, {bytes_text(size)}")
    return 1 if damaged else 0


async def _delete(client: Client, arguments: argparse.Namespace) -> int:
    checkpoint = await client.checkpoints.delete(checkpoint_name(arguments.checkpoint))
    if arguments.json:
        print_json(checkpoint_dict(checkpoint, with_parts=False))
    else:
        print(f"{short(checkpoint.name)}: deleted; it was at position {checkpoint.position:,}")
    return 0
