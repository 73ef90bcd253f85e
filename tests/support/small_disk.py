"""A disk that is really full when it is full."""

import errno
import subprocess
from pathlib import Path


class SmallDisk:
    """A mounted file system with a size limit of its own."""

    def __init__(self, folder: Path, size_kib: int) -> None:
        self.folder = folder
        folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder))

    def fill(self) -> None:
        """Take every byte that is left."""
        with (self.folder / "filler").open("ab", buffering=0) as filler:
            for size in (1 << 16, 1 << 12, 1):
                try:
                    while filler.write(bytes(size)) == size:
                        continue
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise

    def free(self) -> None:
        """Give it back."""
        (self.folder / "filler").unlink()

    def unmount(self) -> None:
        """Take it away again."""
        _run("umount", "--lazy", str(self.folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
