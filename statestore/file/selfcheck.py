"""What lies among blob files and is none."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from forkpoint.statestore.file.ops import FileOps
from forkpoint.statestore.findings import Finding, Severity

DIGEST: Final = re.compile(r"[0-9a-f]{64}\Z")
_PAIR: Final = re.compile(r"[0-9a-f]{2}\Z")


def strange_files(ops: FileOps, root: Path) -> Iterator[Finding]:
    """Files and folders below `root/blobs` that no put makes, and blobs that no get finds where they are."""
    for folder in (root / "blobs" / first for first in ops.names(root / "blobs")):
        if not _PAIR.match(folder.name):
            yield _strange(folder)
            continue
        for name in ops.names(folder):
            if not DIGEST.match(name):
                yield _strange(folder / name)
            elif not name.startswith(folder.name):
                detail = f"a blob of that name belongs into {name[:2]}; it is never read here"
                yield Finding(Severity.WARNING, "MISPLACED_BLOB", str(folder / name), detail)


def _strange(path: Path) -> Finding:
    return Finding(Severity.WARNING, "STRANGE_FILE", str(path), "no blob store made it")
