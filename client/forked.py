"""gRPC does not survive a fork: its threads stay with the parent, and a call in the child would wait for ever."""

import os

_first_user: int | None = None


class ForkedProcessError(RuntimeError):
    """This process was forked from one that had made calls already."""

    def __init__(self, parent: int) -> None:
        super().__init__(
            f"this process was forked from process {parent}, which had made calls: gRPC works in no such child. "
            "Start children with the method `spawn` or `forkserver`, or fork before the first call"
        )
        self.parent = parent


def check_process() -> None:
    """Note the process that makes the first call; raise ForkedProcessError in a process forked from it since."""
    global _first_user
    own = os.getpid()
    if _first_user is None:
        _first_user = own
    if _first_user != own:
        raise ForkedProcessError(_first_user)
