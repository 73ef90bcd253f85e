"""A disk that is really full when it is full."""

import subprocess
from pathlib import Path


class SmallDisk:
    """A mounted file system with a size limit of its own."""

    def __init__(self, folder: Path, size_kib: int) -> None:
        self.folder = folder
        folder.mkdir()
        _run("mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(folder))

    def resize(self, size_kib: int) -> None:
        """Change the limit while the file system is in use."""
        _run("mount", "-o", f"remount,size={size_kib}k", str(self.folder))

    def unmount(self) -> None:
        """Take it away again."""
        _run("umount", "--lazy", str(self.folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)
