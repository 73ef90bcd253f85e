"""`forkpoint chat`: turns with a session, from a terminal or a pipe (one line a turn)."""

import argparse
import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Iterator

from forkpoint.cli.elements import Elements
from forkpoint.cli.names import short
from forkpoint.cli.output import fail
from forkpoint.cli.remote import add_remote, call
from forkpoint.cli.sampling import add_sampling, sampling_arguments
from forkpoint.cli.session_calls import make_workflow, new_session
from forkpoint.cli.shown import enum_name
from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.generation import Generation
from forkpoint.client.session import Session

PROMPT = "> "
HELP = (
    "Empty line or Ctrl-D: leave (the session stays). Ctrl-C: end the model's turn. "
    "/tokens: how many there are. /rewind: take back the last turn."
)


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `chat`."""
    parser = verbs.add_parser("chat", help="turns with a session, from a terminal or a pipe (one line a turn)")
    parser.add_argument("session", help="W/S; made when it does not exist. W alone: a new session")
    parser.add_argument(
        "--thinking",
        choices=("shown", "hidden", "off"),
        help="of a model that thinks before it answers; default: as it was published, shown",
    )
    parser.add_argument("--effort", choices=("low", "high", "max"), default="", help="how much it thinks")
    add_sampling(parser)
    add_remote(parser, with_json=False)
    parser.set_defaults(run=lambda arguments: call(arguments, _chat))


async def _chat(client: Client, arguments: argparse.Namespace) -> int:
    session = await _find_or_create(client, arguments.session)
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{short(session.name)}. {HELP}", file=sys.stderr)
    turns: list[int] = []
    async for line in _terminal_lines() if terminal else _piped_lines():
        try:
            await _turn(session, line, turns, arguments)
        except RemoteError as error:
            if not terminal:
                raise
            fail(error.reason or error.code, error.message)
    return 0


async def _terminal_lines() -> AsyncGenerator[str, None]:
    """Lines as they are typed, until an empty one or Ctrl-D. Waiting does not block, so that Ctrl-C ends it."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    # While the loop handles any signal itself, every signal wakes it. Else a Ctrl-C in the instant before it waits
    # would be seen with the next key only.
    loop.add_signal_handler(signal.SIGWINCH, lambda: None)
    try:
        while True:
            print(PROMPT, end="", file=sys.stderr, flush=True)
            line = (await reader.readline()).decode(errors="replace").rstrip("\r\n")
            if not line.strip():
                return
            yield line
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)
        transport.close()


async def _piped_lines() -> AsyncIterator[str]:
    """Lines of a pipe or file, empty ones too."""
    for line in sys.stdin:
        yield line.rstrip("\r\n")


async def _turn(session: Session, line: str, turns: list[int], arguments: argparse.Namespace) -> None:
    if line == "/tokens":
        print(f"{(await session.get()).head:,} tokens", flush=True)
    elif line == "/rewind":
        if turns:
            position = turns[-1]
            await session.rewind(position)
            turns.pop()
            print(f"back at {position:,} tokens", flush=True)
        else:
            print("no turn of this chat is left to take back", flush=True)
    else:
        effort = "" if turns else arguments.effort  # said once: the model reads it again with every turn
        turns.append((await session.get()).head)
        generation = session.generate(
            messages=[("user", line)],
            add_generation_prompt=True,
            thinking=None if arguments.thinking is None else arguments.thinking != "off",
            thinking_effort=effort,
            **sampling_arguments(arguments),
        )
        with _interruptible(session):
            await _show(generation, arguments.thinking)
        print(flush=True)
        if generation.finished is not None and enum_name(generation.finished, "reason") != "STOP":
            await _close_turn(session, enum_name(generation.finished, "reason"))


async def _show(generation: Generation, thinking: str | None) -> None:
    """Write the answer to stdout as it comes."""
    elements = Elements(begins_thinking=thinking in ("shown", "hidden"), show_thinking=thinking != "hidden")
    async for chunk in generation:
        sys.stdout.buffer.write(elements.feed(chunk.text_utf8))
        sys.stdout.buffer.flush()
    sys.stdout.buffer.write(elements.flush())
    sys.stdout.buffer.flush()


@contextlib.contextmanager
def _interruptible(session: Session) -> Iterator[None]:
    """Ctrl-C ends the model's turn, not the chat."""
    loop = asyncio.get_running_loop()
    cancels = set[asyncio.Task[object]]()

    def cancel() -> None:
        # owner: this set keeps the task until the stream has ended, which is what it brings about
        cancels.add(loop.create_task(session.cancel_generation()))

    before = signal.getsignal(signal.SIGINT)
    loop.add_signal_handler(signal.SIGINT, cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


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
