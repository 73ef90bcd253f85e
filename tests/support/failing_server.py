"""A serving process whose disk fails on a signal: `python -m tests.support.failing_server WHAT FOLDER PORT_FILE`.

On SIGUSR1 a sync of WHAT fails once ("catalog" or "blobs"), or the disk is full ("full") until SIGUSR2. All else is the
product's, over the hash engine.
"""

import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

import apsw

from forkpoint.server.main import log_json, serve_until_signal
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.support.faults import BROKEN, FaultyOps, FaultyVFS
from tests.support.hash_engine import HashEngine
from tests.support.rpc_site import config_for, parts_for


def main() -> int:
    """Serve until a signal or the failure ends it; returns the exit status."""
    what, folder, port_file = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    vfs, ops = FaultyVFS(), FaultyOps()

    def fail(*_: object) -> None:
        if what == "blobs":
            ops.sync_folder_errno = BROKEN
        elif what == "catalog":
            vfs.sync_error = apsw.IOError("fsync failed")
        else:
            vfs.write_error = apsw.FullError("no room")

    def heal(*_: object) -> None:
        vfs.write_error = None

    signal.signal(signal.SIGUSR1, fail)
    signal.signal(signal.SIGUSR2, heal)
    config = config_for(folder, port_file=port_file)
    engine = HashEngine()
    engine.step_pause = 0.005
    parts = replace(
        parts_for(config, engine),
        catalog=SqliteCatalog(folder / "catalog.sqlite", vfs=vfs.vfs_name),
        blobs=FileBlobs(folder / "blobs", ops),
    )
    log_json()
    return asyncio.run(serve_until_signal(config, parts))


if __name__ == "__main__":
    sys.exit(main())
