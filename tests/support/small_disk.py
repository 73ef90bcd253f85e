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

    def close(self) -> None:
        """As unmount."""
        self.unmount()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


class LoopDisk:
    """An ext4 file system in an image whose own disk is too small for it: once that is full, writes fail with EIO,
    as on a disk that dies. `grow` gives it room; then the file system must be mounted anew."""

    def __init__(self, folder: Path, size_mib: int, backing_mib: int) -> None:
        self._backing = SmallDisk(folder.with_name(f"{folder.name}-backing"), backing_mib * 1024)
        self._image = self._backing.folder / "image"
        self.folder = folder
        folder.mkdir()
        try:
            with self._image.open("wb") as image:
                image.truncate(size_mib << 20)
            _run("mkfs.ext4", "-q", "-F", "-J", "size=4", "-E", "lazy_itable_init=1", str(self._image))
            self.mount()
        except (OSError, subprocess.CalledProcessError):
            self._backing.unmount()
            raise

    def mount(self, *options: str) -> None:
        """Mount it at `folder`."""
        _run("mount", "-o", ",".join(("loop", *options)), str(self._image), str(self.folder))

    def remount(self, options: str) -> None:
        """Change its options: "ro" or "rw"."""
        _run("mount", "-o", f"remount,{options}", str(self.folder))

    def unmount(self) -> None:
        """Take the file system away; its image stays."""
        _run("umount", str(self.folder))

    def grow(self, mib: int) -> None:
        """Give the image's disk so much room in all, and repair the file system, which must not be mounted."""
        _run("mount", "-o", f"remount,size={mib}m", str(self._backing.folder))
        subprocess.run(["e2fsck", "-fy", str(self._image)], check=False, capture_output=True, timeout=60)

    def close(self) -> None:
        """Unmount all of it."""
        subprocess.run(["umount", "--lazy", str(self.folder)], check=False, capture_output=True, timeout=30)
        self._backing.unmount()
