"""`forkpoint node …`: the nodes of a cluster, and moving work between them."""

import argparse
from typing import Any

from forkpoint.cli.names import short
from forkpoint.cli.output import print_json, print_json_line, print_table
from forkpoint.cli.remote import add_remote, call
from forkpoint.cli.shown import NODE_COLUMNS, enum_name, node_dict, node_row
from forkpoint.client.client import Client

_Actions = argparse._SubParsersAction
_Parser = argparse.ArgumentParser


def add_parser(verbs: "_Actions[_Parser]") -> None:
    """Add `node` and its sub-verbs."""
    parser = verbs.add_parser("node", help="list, watch and drain the nodes of a cluster, spread sessions over them")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="each node's newest incarnation, and older ones that still live")
    listing.add_argument("--all", action="store_true", help="dead incarnations too, as long as the store knows them")
    add_remote(listing)
    listing.set_defaults(run=lambda arguments: call(arguments, _list))
    watch = actions.add_parser("watch", help="every node as it is, then each change, until Ctrl-C")
    add_remote(watch)
    watch.set_defaults(run=lambda arguments: call(arguments, _watch))
    drain = actions.add_parser(
        "drain",
        help="place nothing on a node any more, and move its sessions to others or park them",
        epilog="Exits with 1 when sessions are left. Ctrl-C stops the moves; the node stays drained until `undrain`.",
    )
    drain.add_argument("node", metavar="NODE")
    add_remote(drain)
    drain.set_defaults(run=lambda arguments: call(arguments, _drain))
    undrain = actions.add_parser("undrain", help="let sessions be placed on a node again")
    undrain.add_argument("node", metavar="NODE")
    add_remote(undrain)
    undrain.set_defaults(run=lambda arguments: call(arguments, _undrain))
    rebalance = actions.add_parser(
        "rebalance",
        help="move running sessions from the nodes that have the most to those that have the least",
        epilog="Exits with 1 when a session stayed that was to move.",
    )
    rebalance.add_argument("--moves-max", type=int, default=0, metavar="N", help="0: as many as it takes (default)")
    rebalance.add_argument("--dry-run", action="store_true", help="only say what would move")
    add_remote(rebalance)
    rebalance.set_defaults(run=lambda arguments: call(arguments, _rebalance))


async def _list(client: Client, arguments: argparse.Namespace) -> int:
    nodes = [node async for node in client.nodes.list()]
    newest = {node.name: node.incarnation for node in nodes}
    if not arguments.all:
        nodes = [n for n in nodes if enum_name(n, "state") != "DEAD" or newest[n.name] == n.incarnation]
    if arguments.json:
        print_json([node_dict(node) for node in nodes])
    else:
        print_table(NODE_COLUMNS, [node_row(node) for node in nodes])
    return 0


async def _watch(client: Client, arguments: argparse.Namespace) -> int:
    async with client.nodes.watch() as events:
        async for event in events:
            if arguments.json:
                print_json_line(node_dict(event.node) | {"gone": event.gone})
            else:
                print(_line(event), flush=True)
    return 0


def _line(event: Any) -> str:
    node = event.node
    name = node.name.removeprefix("nodes/")
    if event.gone:
        return f"{name}  gone ({node.incarnation})"
    return (
        f"{name}  {enum_name(node, 'state')}, {node.sessions:,} sessions, {node.waiting:,} waiting, "
        f"{node.following:,} followed, {node.slots_free:,} of {node.slots_total:,} slots free"
    )


async def _drain(client: Client, arguments: argparse.Namespace) -> int:
    left = 0
    async with client.nodes.drain(arguments.node) as events:
        async for event in events:
            left = event.sessions_left
            if arguments.json:
                print_json_line(
                    {
                        "sessions_left": event.sessions_left,
                        "sessions_moved": event.sessions_moved,
                        "sessions_parked": event.sessions_parked,
                    }
                )
            else:
                print(
                    f"{event.sessions_moved:,} moved, {event.sessions_parked:,} parked, {event.sessions_left:,} left",
                    flush=True,
                )
    return 1 if left else 0


async def _undrain(client: Client, arguments: argparse.Namespace) -> int:
    node = await client.nodes.undrain(arguments.node)
    if arguments.json:
        print_json(node_dict(node))
    else:
        print_table(NODE_COLUMNS, [node_row(node)])
    return 0


async def _rebalance(client: Client, arguments: argparse.Namespace) -> int:
    moves = stayed = 0
    events = client.nodes.rebalance(moves_max=arguments.moves_max, dry_run=arguments.dry_run)
    async with events:
        async for move in events:
            moves += 1
            stayed += bool(move.problem)
            if arguments.json:
                print_json_line(
                    {
                        "name": move.name,
                        "source_node": move.source_node,
                        "target_node": move.target_node,
                        "moved": move.moved,
                        "problem": move.problem,
                    }
                )
            else:
                print(_moved(move, arguments.dry_run), flush=True)
    if not moves and not arguments.json:
        print("nothing to move")
    return 1 if stayed else 0


def _moved(move: Any, dry_run: bool) -> str:
    source, target = (node.removeprefix("nodes/") for node in (move.source_node, move.target_node))
    if move.problem:
        return f"{short(move.name)} stays on {source}: {move.problem}"
    return f"{short(move.name)} {'would move' if dry_run else 'moved'} from {source} to {target}"
