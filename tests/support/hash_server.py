"""A serving process over the hash engine: `python -m tests.support.hash_server FOLDER PORT STEP_PAUSE PORT_FILE`.

Everything but the model is the product's: main's signals and lines, SQLite, files, gRPC.
"""

import asyncio
import sys
from pathlib import Path

from forkpoint.config import load_config
from forkpoint.server.main import log_json, serve_until_signal
from tests.support.hash_engine import HashEngine
from tests.support.rpc_site import parts_for


def main() -> int:
    """Serve until SIGTERM; returns the exit status."""
    folder, port, step_pause, port_file = sys.argv[1:]
    flags = {"data": Path(folder), "port": int(port), "port_file": Path(port_file), "checkpoint_every": 32}
    config = load_config(flags, environment={})
    engine = HashEngine()
    engine.step_pause = float(step_pause)
    log_json()
    return asyncio.run(serve_until_signal(config, parts_for(config, engine)))


if __name__ == "__main__":
    sys.exit(main())
