"""`forkpoint workflow …`: groups of sessions."""

import argparse

from forkpoint.cli.names import short, workflow_name
from forkpoint.cli.output import print_json, print_table
from forkpoint.cli.remote import add_remote, call
from forkpoint.cli.session_calls import labels
from forkpoint.cli.shown import workflow_dict
from forkpoint.client.client import Client
from forkpoint.errors import InvalidFieldError

STANDBYS = "nodes that follow each session made in it from then on (default 0)"


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `workflow` and its sub-verbs."""
    parser = verbs.add_parser("workflow", help="create, change and list workflows")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="a new workflow")
    create.add_argument("workflow", nargs="?", help="its id (default: drawn)")
    create.add_argument("--label", action="append", default=[], metavar="KEY=VALUE")
    create.add_argument("--standbys", type=int, default=0, metavar="N", help=STANDBYS)
    add_remote(create)
    create.set_defaults(run=lambda arguments: call(arguments, _create))
    update = actions.add_parser("update", help="change what a workflow was created with")
    update.add_argument("workflow")
    update.add_argument("--label", action="append", default=None, metavar="KEY=VALUE", help="instead of all labels")
    update.add_argument("--standbys", type=int, metavar="N", help=STANDBYS)
    add_remote(update)
    update.set_defaults(run=lambda arguments: call(arguments, _update))
    listing = actions.add_parser("list", help="all workflows")
    add_remote(listing)
    listing.set_defaults(run=lambda arguments: call(arguments, _list))
    usage = actions.add_parser("usage", help="tokens of a workflow, what forks share counted once")
    usage.add_argument("workflow")
    add_remote(usage)
    usage.set_defaults(run=lambda arguments: call(arguments, _usage))


async def _create(client: Client, arguments: argparse.Namespace) -> int:
    workflow_id = workflow_name(arguments.workflow).removeprefix("workflows/") if arguments.workflow else ""
    workflow = await client.workflows.create(workflow_id, labels=labels(arguments.label), standbys=arguments.standbys)
    if arguments.json:
        print_json(workflow_dict(workflow))
    else:
        print(short(workflow.name))
    return 0


async def _update(client: Client, arguments: argparse.Namespace) -> int:
    if arguments.label is None and arguments.standbys is None:
        raise InvalidFieldError("workflow update", "nothing to change: see --help")
    given = None if arguments.label is None else labels(arguments.label)
    workflow = await client.workflows.update(workflow_name(arguments.workflow), given, standbys=arguments.standbys)
    if arguments.json:
        print_json(workflow_dict(workflow))
    else:
        print(short(workflow.name))
    return 0


async def _list(client: Client, arguments: argparse.Namespace) -> int:
    found = [workflow_dict(workflow) async for workflow in client.workflows.list()]
    if arguments.json:
        print_json(found)
    else:
        rows = [
            (short(w["name"]), " ".join(f"{k}={v}" for k, v in w["labels"].items()), w["create_time"]) for w in found
        ]
        print_table(("workflow", "labels", "created"), rows)
    return 0


async def _usage(client: Client, arguments: argparse.Namespace) -> int:
    name = workflow_name(arguments.workflow)
    usage = await client.workflows.usage(name)
    if arguments.json:
        print_json({"name": name, "prompt_tokens": usage.prompt_tokens, "generated_tokens": usage.generated_tokens})
    else:
        print(f"{usage.prompt_tokens:,} prompt tokens, {usage.generated_tokens:,} generated")
    return 0
