"""What a driver turns in a running server from outside: its wall clock, and how slow its blobs are."""

import asyncio
import mmap
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, TypeVar

from forkpoint.clock import SystemClock
from forkpoint.statestore.blobs import BlobStore
from forkpoint.statestore.wrappers.around import AroundBlobs

T = TypeVar("T")
_LAYOUT: Final = struct.Struct("<qq")


class Knobs:
    """Two numbers in a file that driver and server have mapped: microseconds that the wall clock is off, and
    milliseconds that every call for a blob takes longer."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_LAYOUT.size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), _LAYOUT.size)

    @property
    def wall_offset_us(self) -> int:
        """What the wall clock is off by."""
        return int(_LAYOUT.unpack_from(self._map)[0])

    @property
    def blob_pause_ms(self) -> int:
        """What a call for a blob takes longer."""
        return int(_LAYOUT.unpack_from(self._map)[1])

    def turn(self, wall_offset_us: int | None = None, blob_pause_ms: int | None = None) -> None:
        """Set one or both."""
        values = (wall_offset_us, blob_pause_ms)
        old = (self.wall_offset_us, self.blob_pause_ms)
        _LAYOUT.pack_into(self._map, 0, *(o if v is None else v for v, o in zip(values, old, strict=True)))


class KnobClock(SystemClock):
    """The machine's clocks, the wall clock off by what the knob says."""

    def __init__(self, knobs: Knobs) -> None:
        self._knobs = knobs

    def wall_us(self) -> int:
        return super().wall_us() + self._knobs.wall_offset_us


class SlowBlobs(AroundBlobs):
    """Blobs on a disk as slow as the knob says."""

    def __init__(self, inner: BlobStore, knobs: Knobs) -> None:
        super().__init__(inner)
        self._knobs = knobs

    async def _around(self, method: str, nbytes: int, call: Callable[[], Awaitable[T]]) -> T:
        if pause := self._knobs.blob_pause_ms:
            await asyncio.sleep(pause / 1000)
        return await call()
