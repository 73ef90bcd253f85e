"""`forkpoint workflow …`: groups of sessions."""

import argparse

from forkpoint.cli.names import short, workflow_name
from forkpoint.cli.output import print_json, print_table
from forkpoint.cli.remote import add_remote, call
from forkpoint.cli.session_calls import labels
from forkpoint.cli.shown import workflow_dict
from forkpoint.client.client import Client


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `workflow` and its sub-verbs."""
    parser = verbs.add_parser("workflow", help="create and list workflows")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="a new workflow")
    create.add_argument("workflow", nargs="?", help="its id (default: drawn)")
    create.add_argument("--label", action="append", default=[], metavar="KEY=VALUE")
    add_remote(create)
    create.set_defaults(run=lambda arguments: call(arguments, _create))
    listing = actions.add_parser("list", help="all workflows")
    add_remote(listing)
    listing.set_defaults(run=lambda arguments: call(arguments, _list))
    usage = actions.add_parser("usage", help="tokens of a workflow, what forks share counted once")
    usage.add_argument("workflow")
    add_remote(usage)
    usage.set_defaults(run=lambda arguments: call(arguments, _usage))


async def _create(client: Client, arguments: argparse.Namespace) -> int:
    workflow_id = workflow_name(arguments.workflow).removeprefix("workflows/") if arguments.workflow else ""
    workflow = await client.workflows.create(workflow_id, labels=labels(arguments.label))
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
