"""`python -m tests.crash.victims FOLDER`: processes that are killed (SIGKILL) at every stage of a checkpoint.

Each victim is forked off this process before it has a thread, makes a store of its own, saves one checkpoint, and then
saves another with the fuse lit: it kills itself at the stage that FORKPOINT_TEST_KILL_AT names. The last one survives.
"""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import apsw

from forkpoint.ids import SessionName
from forkpoint.parts import PartSpec
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.blobs import Buffer
from forkpoint.statestore.calls import AppendTokens
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.checkpoint import CheckpointStore
from forkpoint.statestore.file.blobs import FileBlobs
from forkpoint.statestore.file.ops import SystemFileOps
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.support.store import MARKER, name, owned, request

KILL_AT: Final = "FORKPOINT_TEST_KILL_AT"
SESSION: Final = name("s")
TOKENS: Final = tuple(range(100, 180))
SPECS: Final = (PartSpec("kda.000.state.0", "uint8", (900,)), PartSpec("mla.page.000000", "uint8", (600,)))
STAGES_MAX: Final = 200


class Fuse:
    """Counts stages once it is lit."""

    def __init__(self) -> None:
        self._at = int(os.environ.get(KILL_AT, "0"))
        self._stage = 0
        self.lit = False

    def burn(self) -> None:
        """One stage further."""
        if self.lit:
            self._stage += 1
            if self._stage == self._at:
                os.kill(os.getpid(), signal.SIGKILL)


class BurningOps(SystemFileOps):
    """Every operation on a blob's file is a stage; a write has one in its middle, too."""

    def __init__(self, fuse: Fuse) -> None:
        self._fuse = fuse

    def make_folder(self, path: Path) -> None:
        self._fuse.burn()
        super().make_folder(path)

    def write_synced(self, path: Path, pieces: Sequence[Buffer]) -> None:
        self._fuse.burn()
        if self._fuse.lit:
            data = b"".join(pieces)
            path.write_bytes(data[: len(data) // 2])
            self._fuse.burn()
        super().write_synced(path, pieces)

    def rename(self, source: Path, target: Path) -> None:
        self._fuse.burn()
        super().rename(source, target)

    def sync_folder(self, path: Path) -> None:
        self._fuse.burn()
        super().sync_folder(path)


class BurningVFS(apsw.VFS):
    """Every write and sync of SQLite is a stage."""

    def __init__(self, fuse: Fuse) -> None:
        self.fuse = fuse
        self.vfs_name = "burning"
        super().__init__(self.vfs_name, "")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        return _BurningFile(self.fuse, name, flags)


class _BurningFile(apsw.VFSFile):
    def __init__(self, fuse: Fuse, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__("", name, flags)
        self._fuse = fuse

    def xWrite(self, data: bytes, offset: int) -> None:
        self._fuse.burn()
        super().xWrite(data, offset)

    def xSync(self, flags: int) -> None:
        self._fuse.burn()
        super().xSync(flags)


class BurningCatalog:
    """Every call is a stage before it begins and one after its answer."""

    def __init__(self, inner: Catalog, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    def __getattr__(self, method: str) -> Any:
        target = getattr(self._inner, method)
        if not callable(target):
            return target

        async def call(*args: Any, **keywords: Any) -> Any:
            self._fuse.burn()
            answer = await target(*args, **keywords)
            self._fuse.burn()
            return answer

        return call


def state(position: int) -> list[tuple[PartSpec, bytes]]:
    """The parts at a grid position."""
    return [(spec, random.Random(f"{spec.name} {position}").randbytes(spec.nbytes)) for spec in SPECS]


async def save(
    catalog: Catalog,
    store: CheckpointStore,
    session: SessionName,
    grid: int,
    parts: Sequence[tuple[PartSpec, bytes]] = (),
) -> None:
    """Checkpoint `c<grid>`, of `parts` or the usual ones."""
    row = await catalog.get_session(session)
    hashes = dict(grid_hashes(root_hash(MARKER), TOKENS))
    await store.save(
        session=session,
        epoch=row.epoch,
        checkpoint=f"c{grid}",
        position=grid,
        grid_position=grid,
        chain_hash=hashes[grid],
        numerics_ids=("n",),
        model_digest=MARKER.model_digest,
        tokenizer_digest=MARKER.tokenizer_digest,
        layout="tiny",
        parts=parts or state(grid),
        request=request(f"c{grid}"),
    )


async def live(folder: Path) -> None:
    """A victim's life."""
    fuse = Fuse()
    vfs = BurningVFS(fuse)
    catalog = SqliteCatalog(folder / "catalog.db", vfs=vfs.vfs_name)
    await catalog.open(MARKER)
    blobs = FileBlobs(folder / "blobs", BurningOps(fuse))
    await blobs.open()
    row = await owned(catalog, SESSION.session)
    await catalog.append(AppendTokens(SESSION, row.epoch, TOKENS))
    burning = cast(Catalog, BurningCatalog(catalog, fuse))
    store = CheckpointStore(burning, blobs)
    await save(catalog, store, SESSION, 32)
    fuse.lit = True
    await save(burning, store, SESSION, 64)
    fuse.lit = False
    await catalog.close()
    await blobs.close()


def main() -> int:
    """Fork victims until one survives."""
    root = Path(sys.argv[1])
    for stage in range(1, STAGES_MAX):
        folder = root / f"stage-{stage}"
        folder.mkdir()
        victim = os.fork()
        if victim == 0:
            os.environ[KILL_AT] = str(stage)
            asyncio.run(live(folder))
            os._exit(0)
        _, status = os.waitpid(victim, 0)
        if os.waitstatus_to_exitcode(status) == 0:
            print(stage)
            return 0
        if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
            return 1
    return 1


if __name__ == "__main__":
    sys.exit(main())
