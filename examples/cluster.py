"""A small cluster on this machine, for the examples beside this file: `forkpoint serve` processes over one SQLite file.

Not an example by itself. A cluster of one's own is started by whatever starts services, with the same command lines.
"""

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

LOOK_SECONDS, LOOKS_MAX = 0.05, 6000
"""How often and how many times a node is asked whether it serves."""


class Cluster:
    """Nodes that share a store in a temporary folder. They run inside the block of `with`.

    `settings`: flags of `forkpoint serve` for every node.
    """

    def __init__(self, names: Sequence[str] = ("a", "b", "c"), settings: Sequence[str] = ()) -> None:
        self.names, self.settings = tuple(names), tuple(settings)
        self._folder = tempfile.TemporaryDirectory(prefix="forkpoint-cluster-", ignore_cleanup_errors=True)
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            for name in self.names:
                self.start(name)
            for name in self.names:
                self.address(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def addresses(self) -> list[str]:
        """`host:port` of each node that was started and not stopped. A client takes them all."""
        return [self.address(name) for name in self._running]

    def address(self, name: str) -> str:
        """Where a node listens; waits until it serves."""
        for _ in range(LOOKS_MAX):
            if self._port_file(name).exists():
                return self._port_file(name).read_text()
            with suppress(subprocess.TimeoutExpired):
                self._running[name].wait(LOOK_SECONDS)
                break  # it has ended
        raise RuntimeError(f"{name} does not serve:\n{self._log(name).read_text()[-2000:]}")

    def start(self, name: str) -> None:
        """Start a node; it serves some seconds later."""
        self._port_file(name).unlink(missing_ok=True)
        command = [
            *(sys.executable, "-m", "forkpoint.cli.main", "serve", "--node", name),
            *("--data", str(self._root / "store"), "--port", "0", "--port-file", str(self._port_file(name))),
            *self.settings,
        ]
        with self._log(name).open("ab") as log:
            self._running[name] = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """kill -9, as the out-of-memory killer would."""
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def stop(self, name: str) -> int:
        """SIGTERM; returns the exit status once the node has left."""
        process = self._running.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait()

    def close(self) -> None:
        """End every node, and delete the store."""
        for name in list(self._running):
            self.kill(name)
        self._folder.cleanup()

    @property
    def _root(self) -> Path:
        return Path(self._folder.name)

    def _port_file(self, name: str) -> Path:
        return self._root / f"{name}.port"

    def _log(self, name: str) -> Path:
        return self._root / f"{name}.log"
