"""The steps of a move, and where a server waits at one of them until its driver lets it go on."""

import asyncio
import mmap
from pathlib import Path
from typing import Final

SOURCE: Final = (
    "begin_migration.before",
    "begin_migration.after",
    "follow.before",
    "follow.restored",
    "follow.near",
    "peer_cut_over.before",
    "peer_cut_over.after",
)
"""What the owner of a session does, in order: the migration's id goes into its row, the target follows it, tells that
it is restored, tells more, is asked to cut over, and has answered."""
TARGET: Final = (
    "get_session.after",
    "find_manifests.before",
    "open_generation.before",
    "cut_over.before",
    "cut_over.after",
    "commit_step.before",
    "commit_step.after",
)
"""What the target does: it looks at the row, restores, looks at the generation, becomes the owner, and commits its
first step."""
POLL_SECONDS: Final = 0.002
_NAME: Final = 64
"""Bytes for a step's name; one more says that it was reached."""


class Gate:
    """A file that driver and server have mapped: the step that is armed, and whether the server waits there."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_NAME + 1))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _NAME + 1)

    def arm(self, step: str) -> None:
        """Let the server wait when it comes to this step, once; "": nowhere."""
        self._map[:] = step.encode().ljust(_NAME + 1, b"\0")

    @property
    def waits(self) -> bool:
        """Whether the server waits."""
        return self._map[_NAME] == 1

    def open(self) -> None:
        """Let it go on."""
        self._map[_NAME] = 0

    async def reach(self, step: str) -> None:
        """The server comes to a step."""
        if self._map[:_NAME].rstrip(b"\0") != step.encode():
            return
        self.arm("")
        self._map[_NAME] = 1
        while self.waits:
            await asyncio.sleep(POLL_SECONDS)
