"""What the sub-verbs of `forkpoint session` do."""

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from forkpoint.cli.names import session_name, short, split_session, workflow_name
from forkpoint.cli.output import bytes_text, print_fields, print_json, print_json_line, print_table
from forkpoint.cli.remote import call
from forkpoint.cli.shown import SESSION_COLUMNS, enum_name, session_dict, session_row, tree_lines
from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.frames import frame, read_frames
from forkpoint.client.session import Session
from forkpoint.errors import InvalidFieldError

T = TypeVar("T")
Action = Callable[[Client, argparse.Namespace], Awaitable[int]]


def run(action: Action, arguments: argparse.Namespace) -> int:
    """Connect and do it."""
    return call(arguments, action)


def opened(client: Client, arguments: argparse.Namespace) -> Session:
    """The session that the command line names."""
    return client.sessions.open(session_name(arguments.session))


async def create(client: Client, arguments: argparse.Namespace) -> int:
    """session create"""
    workflow, session_id = new_session(arguments.session)
    if arguments.create_workflow:
        await make_workflow(client, workflow)
    session = await client.sessions.create(
        workflow,
        session_id,
        seed=arguments.seed,
        every_tokens=arguments.every_tokens,
        on_turn_end=arguments.on_turn_end,
        labels=labels(arguments.label),
        transient=arguments.transient,
        standbys=arguments.standbys,
    )
    return await _done(session, arguments)


async def update(client: Client, arguments: argparse.Namespace) -> int:
    """session update"""
    changes = {
        "labels": None if arguments.label is None else labels(arguments.label),
        "every_tokens": arguments.every_tokens,
        "on_turn_end": arguments.on_turn_end,
        "keep_last": arguments.keep_last,
        "standbys": arguments.standbys,
    }
    if all(value is None for value in changes.values()):
        raise InvalidFieldError("session update", "nothing to change: see --help")
    session = opened(client, arguments)
    await session.update(**changes)
    return await _done(session, arguments)


async def list_all(client: Client, arguments: argparse.Namespace) -> int:
    """session list"""
    found = [s async for s in client.sessions.list(_scope(arguments), show_deleted=arguments.deleted)]
    if arguments.json:
        print_json([session_dict(session) for session in found])
    else:
        print_table(SESSION_COLUMNS, [session_row(session) for session in found])
    return 0


async def tree(client: Client, arguments: argparse.Namespace) -> int:
    """session tree"""
    found = [s async for s in client.sessions.list(_scope(arguments), show_deleted=arguments.deleted)]
    nodes = {node.name: node async for node in client.nodes.list()} if arguments.cluster else {}
    if arguments.json:
        keys = ["name", "parent", "fork_position", "head", "state", *(["node"] if arguments.cluster else [])]
        shown = [{key: session_dict(session)[key] for key in keys} for session in found]
        if arguments.cluster:
            for session in shown:
                owner = nodes.get(session["node"])
                session["node_state"] = "" if owner is None else enum_name(owner, "state")
        print_json(shown)
    else:
        print("\n".join(tree_lines(found, nodes if arguments.cluster else None)))
    return 0


async def show(client: Client, arguments: argparse.Namespace) -> int:
    """session show"""
    resource = session_dict(await opened(client, arguments).get())
    if arguments.json:
        print_json(resource)
    else:
        lists = {key: ", ".join(v) for key, v in resource.items() if isinstance(v, list)}
        maps = {key: " ".join(f"{k}={v}" for k, v in m.items()) for key, m in resource.items() if isinstance(m, dict)}
        print_fields({key: "" if v is None else v for key, v in (resource | lists | maps).items()})
    return 0


async def fork(client: Client, arguments: argparse.Namespace) -> int:
    """session fork"""
    if arguments.ids and arguments.count not in (0, len(arguments.ids)):
        raise InvalidFieldError("--count", f"{arguments.count} children, but {len(arguments.ids)} ids")
    children = await opened(client, arguments).fork(
        arguments.count or len(arguments.ids) or 1,
        position=arguments.position,
        session_ids=arguments.ids,
        seed_policy=arguments.seeds or "",
        transient=arguments.transient,
    )
    resources = [await child.get() for child in children]
    if arguments.json:
        print_json([session_dict(resource) for resource in resources])
    else:
        print_table(SESSION_COLUMNS, [session_row(resource) for resource in resources])
    return 0


async def rewind(client: Client, arguments: argparse.Namespace) -> int:
    """session rewind"""
    session = opened(client, arguments)
    await session.rewind(arguments.position)
    return await _done(session, arguments)


async def pause(client: Client, arguments: argparse.Namespace) -> int:
    """session pause"""
    session = opened(client, arguments)
    await session.pause()
    return await _done(session, arguments)


async def resume(client: Client, arguments: argparse.Namespace) -> int:
    """session resume"""
    answer = await opened(client, arguments).resume()
    if arguments.json:
        print_json(
            {
                "session": session_dict(answer.session),
                "restored_tokens": answer.restored_tokens,
                "replayed_tokens": answer.replayed_tokens,
                "restored_bytes": answer.restored_bytes,
                "source": answer.source,
                "exact": answer.exact,
            }
        )
    else:
        print(
            f"{short(answer.session.name)}: {answer.restored_tokens:,} tokens restored "
            f"({bytes_text(answer.restored_bytes)} from {answer.source or 'nowhere'}), "
            f"{answer.replayed_tokens:,} replayed, {'exact' if answer.exact else 'not exact'}"
        )
    return 0


async def release(client: Client, arguments: argparse.Namespace) -> int:
    """session release"""
    session = opened(client, arguments)
    await session.release_quarantine()
    return await _done(session, arguments)


async def cancel(client: Client, arguments: argparse.Namespace) -> int:
    """session cancel"""
    session = opened(client, arguments)
    await session.cancel_generation()
    return await _done(session, arguments)


async def delete(client: Client, arguments: argparse.Namespace) -> int:
    """session delete"""
    session = opened(client, arguments)
    await session.delete()
    return await _done(session, arguments)


async def undelete(client: Client, arguments: argparse.Namespace) -> int:
    """session undelete"""
    session = opened(client, arguments)
    await session.undelete()
    return await _done(session, arguments)


async def tokens(client: Client, arguments: argparse.Namespace) -> int:
    """session tokens: one line a chunk, or the text"""
    async for chunk in opened(client, arguments).tokens(arguments.start, arguments.end):
        if arguments.text:
            sys.stdout.buffer.write(chunk.text_utf8)
            sys.stdout.buffer.flush()
        elif arguments.json:
            # 1 is a prompt's token, 2 a generated one, as in the API.
            print_json_line(
                {"start": chunk.start, "token_ids": list(chunk.token_ids), "kinds": [int(kind) for kind in chunk.kinds]}
            )
        else:
            print(" ".join(map(str, chunk.token_ids)))
    return 0


async def export(client: Client, arguments: argparse.Namespace) -> int:
    """session export: a file appears whole or not at all"""
    chunks = opened(client, arguments).export()
    if arguments.file == "-":
        async for chunk in chunks:
            sys.stdout.buffer.write(frame(chunk))
        return 0
    target = Path(arguments.file)
    partial = target.with_name(target.name + ".part")
    try:
        with partial.open("wb") as file:
            async for chunk in chunks:
                file.write(frame(chunk))
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return 0


async def import_file(client: Client, arguments: argparse.Namespace) -> int:
    """session import"""
    workflow, session_id = new_session(arguments.session)
    with _reading(arguments.file) as file:
        try:
            # Read to its end first: a file that is cut off is refused here, not in the middle of a call.
            chunks = list(read_frames(file))
        except ValueError as error:
            raise InvalidFieldError("file", str(error)) from error
    session = await client.sessions.import_(workflow, _each(chunks), session_id, request_id=arguments.request_id)
    return await _done(session, arguments)


async def make_workflow(client: Client, workflow: str) -> None:
    """Create a workflow unless it is there."""
    try:
        await client.workflows.create(workflow.removeprefix("workflows/"))
    except RemoteError as error:
        if error.code != "ALREADY_EXISTS":
            raise


def labels(pairs: list[str]) -> dict[str, str]:
    """`KEY=VALUE` flags as labels."""
    found = dict[str, str]()
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not key or not sign:
            raise InvalidFieldError("--label", f"{pair!r} is not KEY=VALUE")
        found[key] = value
    return found


def new_session(text: str) -> tuple[str, str]:
    """(workflow, session id) of a session to be made; the id is "" when only a workflow is named."""
    parts = text.split("/")
    if len(parts) == 1 or (len(parts) == 2 and parts[0] == "workflows"):
        return workflow_name(text), ""
    return split_session(text)


def _scope(arguments: argparse.Namespace) -> str:
    return "-" if arguments.workflow == "-" else workflow_name(arguments.workflow)


async def _done(session: Session, arguments: argparse.Namespace) -> int:
    resource = await session.get()
    if arguments.json:
        print_json(session_dict(resource))
    else:
        print_table(SESSION_COLUMNS, [session_row(resource)])
    return 0


async def _each(items: Iterable[T]) -> AsyncIterator[T]:
    for item in items:
        yield item


@contextlib.contextmanager
def _reading(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
    else:
        with Path(path).open("rb") as file:
            yield file
