"""`forkpoint generate`: append something, perhaps, and stream what the model says."""

import argparse
import math
import sys
from pathlib import Path

from forkpoint.cli.names import session_name
from forkpoint.cli.output import print_json_line
from forkpoint.cli.remote import add_remote, call
from forkpoint.cli.sampling import add_sampling, sampling_arguments
from forkpoint.cli.shown import enum_name
from forkpoint.client.client import Client
from forkpoint.client.generation import Generation
from forkpoint.errors import InvalidFieldError


def add_parser(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `generate`."""
    parser = verbs.add_parser("generate", help="append input, perhaps, and stream what the model says")
    parser.add_argument("session", help="W/S")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--text", help="append this text as it is")
    source.add_argument("--user", metavar="TEXT", help="append a user turn and open the assistant's")
    source.add_argument("--file", metavar="FILE", help="append a file's text as it is, - for stdin")
    parser.add_argument("--request-id", help="the same id attaches to the same generation again")
    parser.add_argument("--resume-position", type=int, metavar="P", help="first position to stream")
    parser.add_argument("--logprobs", action="store_true", help="with --json: of each sampled token")
    add_sampling(parser)
    add_remote(parser)
    parser.set_defaults(run=lambda arguments: call(arguments, _generate))


async def _generate(client: Client, arguments: argparse.Namespace) -> int:
    generation = client.sessions.open(session_name(arguments.session)).generate(
        text=_text(arguments),
        messages=[("user", arguments.user)] if arguments.user is not None else None,
        add_generation_prompt=arguments.user is not None,
        request_id=arguments.request_id,
        resume_position=arguments.resume_position,
        logprobs=arguments.logprobs,
        **sampling_arguments(arguments),
    )
    if arguments.json:
        await _stream_json(generation)
    else:
        await stream_text(generation)
        print()
    return 0


async def stream_text(generation: Generation) -> None:
    """Write the text to stdout as it comes."""
    async for chunk in generation:
        sys.stdout.buffer.write(chunk.text_utf8)
        sys.stdout.buffer.flush()


async def _stream_json(generation: Generation) -> None:
    """One object a chunk, then one for the end."""
    async for chunk in generation:
        line: dict[str, object] = {
            "start": chunk.start,
            "token_ids": list(chunk.token_ids),
            "text": chunk.text_utf8.decode(errors="replace"),
        }
        if chunk.logprobs:
            line["logprobs"] = [None if math.isnan(value) else value for value in chunk.logprobs]
        print_json_line(line)
    finished = generation.finished
    if finished is not None:
        print_json_line(
            {
                "finished": enum_name(finished, "reason"),
                "request_id": generation.request.request_id,
                "head": finished.head,
                "head_hash": finished.head_hash.hex(),
                "stop_position": finished.stop_position,
                "prompt_tokens": finished.usage.prompt_tokens,
                "generated_tokens": finished.usage.generated_tokens,
                "reconnects": len(generation.reconnects),
            }
        )


def _text(arguments: argparse.Namespace) -> bytes | None:
    if arguments.text is not None:
        # What the shell gave is bytes; surrogates stand for those that are no UTF-8, and the server refuses them.
        return str(arguments.text).encode(errors="surrogateescape")
    if arguments.file == "-":
        return sys.stdin.buffer.read()
    if arguments.file is not None:
        try:
            return Path(arguments.file).read_bytes()
        except OSError as error:
            raise InvalidFieldError("--file", str(error)) from error
    return None
