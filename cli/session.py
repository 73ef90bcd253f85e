"""`forkpoint session …`: create, look at, fork, move and delete sessions."""

import argparse

from forkpoint.cli import session_calls as calls
from forkpoint.cli.remote import add_remote


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `session` and its sub-verbs."""
    parser = verbs.add_parser("session", help="create, list, fork, rewind, pause, resume, release, export sessions")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _add_create(actions)
    _add_lists(actions)
    _add_branches(actions)
    _add_life(actions)
    _add_log(actions)


_Actions = argparse._SubParsersAction
_Parser = argparse.ArgumentParser


def _add_create(actions: "_Actions[_Parser]") -> None:
    create = actions.add_parser("create", help="a new, empty session")
    create.add_argument("session", help="W/S, or W alone to have an id drawn")
    create.add_argument("--seed", type=int, help="sampling seed (default: drawn and stored)")
    create.add_argument("--every-tokens", type=int, metavar="N", help="checkpoint interval, 0 for none")
    create.add_argument("--on-turn-end", action="store_true", help="also checkpoint when a generation ends")
    create.add_argument("--label", action="append", default=[], metavar="KEY=VALUE")
    create.add_argument("--transient", action="store_true", help="no checkpoints by count or turn")
    _add_standbys(create, default=0, note="default: the workflow's")
    create.add_argument("--create-workflow", action="store_true", help="make the workflow when it does not exist")
    _finish(create, calls.create)


def _add_standbys(parser: _Parser, default: int | None, note: str) -> None:
    parser.add_argument(
        "--standbys",
        type=int,
        default=default,
        metavar="N",
        help=f"nodes that follow the session, ready to go on when its owner dies ({note})",
    )


def _add_lists(actions: "_Actions[_Parser]") -> None:
    listing = actions.add_parser("list", help="sessions of a workflow, or all")
    listing.add_argument("workflow", nargs="?", default="-", help="W (default: all workflows)")
    listing.add_argument("--deleted", action="store_true", help="deleted ones too")
    _finish(listing, calls.list_all)
    tree = actions.add_parser("tree", help="the fork tree of a workflow, or of all")
    tree.add_argument("workflow", nargs="?", default="-")
    tree.add_argument("--deleted", action="store_true")
    tree.add_argument("--cluster", action="store_true", help="also say which node has each session")
    _finish(tree, calls.tree)
    show = actions.add_parser("show", help="everything about one session")
    show.add_argument("session", help="W/S")
    _finish(show, calls.show)


def _add_branches(actions: "_Actions[_Parser]") -> None:
    fork = actions.add_parser("fork", help="children that share a session's tokens up to a position")
    fork.add_argument("session")
    fork.add_argument("--count", type=int, default=0, help="number of children (default: one, or as many as --id)")
    fork.add_argument("--position", type=int, help="default: the head")
    fork.add_argument("--id", action="append", default=[], dest="ids", metavar="S", help="a child's id; repeatable")
    fork.add_argument("--seeds", choices=["inherit", "derive"], help="default: one child inherits, several derive")
    fork.add_argument("--transient", action="store_true", help="no checkpoints by count or turn")
    _finish(fork, calls.fork)
    rewind = actions.add_parser("rewind", help="go back to a position")
    rewind.add_argument("session")
    rewind.add_argument("--position", type=int, required=True)
    _finish(rewind, calls.rewind)


def _add_life(actions: "_Actions[_Parser]") -> None:
    update = actions.add_parser("update", help="change what a session was created with")
    update.add_argument("session")
    update.add_argument("--label", action="append", default=None, metavar="KEY=VALUE", help="instead of all labels")
    update.add_argument("--every-tokens", type=int, metavar="N", help="checkpoint interval, 0 for none")
    update.add_argument(
        "--on-turn-end", action=argparse.BooleanOptionalAction, help="checkpoint when a generation ends"
    )
    update.add_argument("--keep-last", type=int, metavar="N", help="newest checkpoints that stay")
    _add_standbys(update, default=None, note="0: none")
    _finish(update, calls.update)
    for name, action, text in (
        ("pause", calls.pause, "checkpoint, free the node's memory and give up ownership"),
        (
            "resume",
            calls.resume,
            "take ownership and restore, at the server that is called or one with more room",
        ),
        ("release", calls.release, "let a quarantined session take calls again"),
        ("cancel", calls.cancel, "end the running generation at a token border"),
        ("delete", calls.delete, "hide the session; its descendants live on"),
        ("undelete", calls.undelete, "bring a deleted session back, paused"),
    ):
        parser = actions.add_parser(name, help=text)
        parser.add_argument("session")
        _finish(parser, action)


def _add_log(actions: "_Actions[_Parser]") -> None:
    tokens = actions.add_parser("tokens", help="the token log")
    tokens.add_argument("session")
    tokens.add_argument("--start", type=int, default=0)
    tokens.add_argument("--end", type=int, help="position after the last (default: the head)")
    tokens.add_argument("--text", action="store_true", help="the text instead of the ids")
    _finish(tokens, calls.tokens)
    export = actions.add_parser("export", help="log and generations to a file")
    export.add_argument("session")
    export.add_argument("file", help="- for stdout")
    _finish(export, calls.export)
    load = actions.add_parser("import", help="a new session from an exported file")
    load.add_argument("session", help="W/S, or W alone to have an id drawn")
    load.add_argument("file", help="- for stdin")
    load.add_argument("--request-id", help="the same one again goes on with an import that broke off")
    _finish(load, calls.import_file)


def _finish(parser: argparse.ArgumentParser, action: calls.Action) -> None:
    add_remote(parser)
    parser.set_defaults(run=lambda arguments: calls.run(action, arguments))
