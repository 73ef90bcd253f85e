"""The command line: `forkpoint VERB …`. One file a verb; each adds its parser and names the function that runs it."""

import argparse
import os
import sys
from collections.abc import Sequence

from forkpoint import __version__
from forkpoint.cli import (
    chat,
    check,
    checkpoint,
    doctor,
    gc,
    generate,
    migrate,
    model,
    node,
    plan,
    serve,
    session,
    workflow,
)
from forkpoint.cli.demo import verb as demo
from forkpoint.cli.output import fail
from forkpoint.client.errors import RemoteError
from forkpoint.errors import ForkpointError

VERBS = (serve, demo, session, generate, chat, checkpoint, workflow, node, migrate, plan, model, check, gc, doctor)

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def build_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="forkpoint",
        description="Long-lived agent sessions on hybrid KDA/MLA models: fork, pause, resume, move and recover them.",
    )
    parser.add_argument("--version", action="version", version=f"forkpoint {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_parser(verbs)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 an error (one line on stderr), 2 wrong usage."""
    arguments = build_parser().parse_args(argv)
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
