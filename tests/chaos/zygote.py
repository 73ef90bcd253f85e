"""A process that has imported all that a server needs, and forks one for every order: `python -m tests.chaos.zygote`.

A server that begins as its copy serves within tenths of a second, most of which an interpreter of its own would spend
on imports. Orders come on stdin; stdout tells `{"pid": …}` for each, and `{"pid": …, "status": …}` when one ends. It
never starts a thread, or a copy of it could inherit a lock that nobody opens.
"""

import ctypes
import gc
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Final, NoReturn

from tests.chaos.order import CRASHED, Order
from tests.chaos.server import serve

PR_SET_PDEATHSIG: Final = 1
CLONE_NEWNET: Final = 0x40000000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


def tell(**facts: object) -> None:
    """One line to the driver."""
    os.write(1, json.dumps(facts).encode() + b"\n")


def reap(*_: object) -> None:
    """Tell of all servers that ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        tell(pid=pid, status=os.waitstatus_to_exitcode(status))


def enter(netns: str) -> None:
    """Live in a network namespace of `ip netns`. Raises OSError."""
    with Path("/var/run/netns", netns).open("rb") as file:
        if _LIBC.setns(file.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {netns}")


def become(order: Order) -> NoReturn:
    """The rest of a forked process's life."""
    status = CRASHED
    try:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, source in ((0, nothing), (1, log), (2, log)):
            os.dup2(source, target)
        if order.netns:
            enter(order.netns)
        status = serve(order)
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Until stdin ends; what it forked dies with it."""
    signal.signal(signal.SIGCHLD, reap)
    gc.collect()
    gc.freeze()
    threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    assert threads == 1, f"{threads} threads: a copy could inherit a locked lock"
    tell(ready=True)
    while line := sys.stdin.buffer.readline():
        order = Order.parse(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            become(order)
        tell(pid=pid)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


if __name__ == "__main__":
    main()
