"""The serving process: signals, logs, and the line that says where it serves."""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from forkpoint.clock import SystemClock
from forkpoint.config import ServerConfig
from forkpoint.limits import SHUTDOWN_SECONDS

# Before torch is imported, which reads it once. OpenMP's idle threads spin by default and starve the event loop and the
# engine of another server on the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from forkpoint.server.app import Parts, ServingNode, serving
from forkpoint.server.engine.load_log import LoadLog

LOG: Final = logging.getLogger("forkpoint.server")
WATCHDOG_SECONDS: Final = SHUTDOWN_SECONDS - 0.5
"""A drain that hangs is cut here, with exit status 1. Nothing is lost: what was acknowledged is in the log."""


class JsonLines(logging.Formatter):
    """One JSON object a record. Of an exception it tells types and places, not texts: these may hold tokens."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        facts = getattr(record, "facts", None)
        if isinstance(facts, dict):
            line.update(facts)
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            line["error"] = type(error).__qualname__
            line["frames"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}"
                for frame in traceback.extract_tb(error.__traceback__)[-12:]
            ]
        return json.dumps(line, default=str)


def log_json(level: int = logging.INFO) -> None:
    """Send every log record to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def serve(config: ServerConfig, progress: Callable[[int, int], None] | None = None) -> int:
    """Serve until SIGTERM or SIGINT, then drain; returns the exit status: 1 when it was a store that ended it. Raises
    ConfigError and StateIncompatibleError before it serves. A second signal ends the process at once.

    `progress` is told how many bytes of the model are read, of how many; None: the log is."""
    log_json()
    return asyncio.run(serve_until_signal(config, progress=progress or LoadLog(SystemClock())))


async def serve_until_signal(
    config: ServerConfig, parts: Parts | None = None, progress: Callable[[int, int], None] | None = None
) -> int:
    """As serve, in a running loop of the main thread; `parts` and `progress` as in `serving`."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def leave() -> None:
        stop.set()
        watchdog = threading.Timer(WATCHDOG_SECONDS, _cut_off)
        watchdog.daemon = True
        watchdog.start()

    def on_signal(name: str) -> None:
        if stop.is_set():
            os._exit(1)
        LOG.info("draining", extra={"facts": {"signal": name, "node": config.node}})
        leave()

    async def leave_when_a_store_broke(running: ServingNode) -> None:
        store, cause = await running.store_broken()
        if not stop.is_set():
            facts = {"store": store, "cause": cause, "node": config.node}
            LOG.error("a store broke for good: this process ends, start it again", extra={"facts": facts})
            leave()

    async with serving(config, parts, progress) as running:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal, number.name)
        if config.port_file is not None:
            _write_whole(config.port_file, running.address)
        line = {"event": "serving", "address": running.address, "node": config.node, "pid": os.getpid()}
        print(json.dumps(line), flush=True)
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(leave_when_a_store_broke(running))
            await stop.wait()
            watch.cancel()
    LOG.info("stopped", extra={"facts": {"node": config.node}})
    return 1 if running.catalog.broken or running.blobs.broken else 0


def _cut_off() -> None:
    LOG.error("the drain took too long and was cut off: not every session is checkpointed or released")
    os._exit(1)


def _write_whole(path: Path, text: str) -> None:
    """Write a file that is never seen half written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    temporary.replace(path)
