"""`forkpoint chat`: turns with a session, from a terminal or a pipe (one line a turn)."""

import argparse
import asyncio
import sys

from forkpoint.cli.generate import stream_text
from forkpoint.cli.names import short
from forkpoint.cli.output import fail
from forkpoint.cli.remote import add_remote, call
from forkpoint.cli.sampling import add_sampling, sampling_arguments
from forkpoint.cli.session_calls import make_workflow, new_session
from forkpoint.cli.shown import enum_name
from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.session import Session

PROMPT = "> "
HELP = "Empty line or Ctrl-D: leave (the session stays). /tokens: how many there are. /rewind: take back the last turn."


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `chat`."""
    parser = verbs.add_parser("chat", help="turns with a session, from a terminal or a pipe (one line a turn)")
    parser.add_argument("session", help="W/S; made when it does not exist. W alone: a new session")
    add_sampling(parser)
    add_remote(parser, with_json=False)
    parser.set_defaults(run=lambda arguments: call(arguments, _chat))


async def _chat(client: Client, arguments: argparse.Namespace) -> int:
    session = await _find_or_create(client, arguments.session)
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{short(session.name)}. {HELP}", file=sys.stderr)
    turns: list[int] = []
    while (line := await asyncio.to_thread(_read_line, terminal)) is not None:
        try:
            await _turn(session, line, turns, arguments)
        except RemoteError as error:
            if not terminal:
                raise
            fail(error.reason or error.code, error.message)
    return 0


def _read_line(terminal: bool) -> str | None:
    """The next turn's text; None at the end."""
    if terminal:
        print(PROMPT, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if line == "" or (terminal and not line.strip()):
        return None
    return line.rstrip("\r\n")


async def _turn(session: Session, line: str, turns: list[int], arguments: argparse.Namespace) -> None:
    if line == "/tokens":
        print(f"{(await session.get()).head:,} tokens")
    elif line == "/rewind":
        if turns:
            position = turns[-1]
            await session.rewind(position)
            turns.pop()
            print(f"back at {position:,} tokens")
        else:
            print("no turn of this chat is left to take back")
    else:
        position = (await session.get()).head
        generation = session.generate(
            messages=[("user", line)], add_generation_prompt=True, **sampling_arguments(arguments)
        )
        await stream_text(generation)
        turns.append(position)
        print(flush=True)
        if generation.finished is not None and enum_name(generation.finished, "reason") != "STOP":
            await _close_turn(session, enum_name(generation.finished, "reason"))


async def _close_turn(session: Session, reason: str) -> None:
    """Say why the model stopped in the middle of its turn. The next turn is appended after what is there."""
    print(f"[{reason.lower()} at {(await session.get()).head:,} tokens]", file=sys.stderr)


async def _find_or_create(client: Client, text: str) -> Session:
    workflow, session_id = new_session(text)
    if session_id:
        session = client.sessions.open(f"{workflow}/sessions/{session_id}")
        try:
            await session.get()
            return session
        except RemoteError as error:
            if error.code != "NOT_FOUND":
                raise
    await make_workflow(client, workflow)
    return await client.sessions.create(workflow, session_id)
