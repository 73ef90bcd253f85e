"""The command line: `forkpoint VERB …`. One file a verb; each adds its parser and names the function that runs it."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from forkpoint import __version__
from forkpoint.cli.output import fail
from forkpoint.client.errors import RemoteError
from forkpoint.errors import ForkpointError

VERBS: Final = {
    "serve": "serve",
    "demo": "demo.verb",
    "session": "session",
    "generate": "generate",
    "chat": "chat",
    "checkpoint": "checkpoint",
    "workflow": "workflow",
    "node": "node",
    "migrate": "migrate",
    "plan": "plan",
    "model": "model",
    "check": "check",
    "gc": "gc",
    "doctor": "doctor",
}
"""Each verb's module, below forkpoint.cli."""

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def build_parser(verb: str = "") -> argparse.ArgumentParser:
    """The whole command line, or only what one verb needs of it: imports take most of a short command's time."""
    parser = argparse.ArgumentParser(
        prog="forkpoint",
        description="Long-lived agent sessions on hybrid KDA/MLA models: fork, pause, resume, move and recover them.",
    )
    parser.add_argument("--version", action="version", version=f"forkpoint {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for module in [VERBS[verb]] if verb in VERBS else VERBS.values():
        import_module(f"forkpoint.cli.{module}").add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 an error (one line on stderr), 2 wrong usage."""
    words = sys.argv[1:] if argv is None else argv
    arguments = build_parser(words[0] if words else "").parse_args(words)
    try:
        status: int = arguments.run(arguments)
        sys.stdout.flush()
        return status
    except ForkpointError as error:
        return fail(error.reason, str(error), EXIT_ERROR)
    except RemoteError as error:
        return fail(error.reason or error.code, error.message, EXIT_ERROR)
    except BrokenPipeError:
        # The reader of a pipe went away, as `head` does. Python would complain again while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_ERROR
    except KeyboardInterrupt:
        return fail("INTERRUPTED", "stopped by the keyboard", EXIT_INTERRUPTED)
    except OSError as error:
        return fail("SYSTEM", str(error), EXIT_ERROR)


if __name__ == "__main__":
    sys.exit(main())
