"""Flags of what is generated and how, shared by `generate` and `chat`."""

import argparse
from typing import Any


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Add the sampling flags and limits."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, metavar="N", help="0: up to the context limit")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest (default)")
    group.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off")
    group.add_argument("--top-p", type=float, default=None, metavar="P", help="default: off")
    group.add_argument("--min-p", type=float, default=0.0, metavar="P", help="0: off")
    group.add_argument("--seed", type=int, default=None, help="default: the session's")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="stop text; repeatable")


def sampling_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """The flags as arguments of Client.generate."""
    return {
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "top_k": arguments.top_k,
        "top_p": arguments.top_p,
        "min_p": arguments.min_p,
        "seed": arguments.seed,
        "stop_text": [text.encode() for text in arguments.stop],
    }
