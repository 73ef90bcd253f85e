"""How fast the files of a model can be read at all, with the page cache emptied of them first where that works."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

PIECE_BYTES: Final = 32 << 20
READERS: Final = 8
"""Pieces that are read at the same time: one reader alone does not fill a fast disk."""


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files."""
    return sorted(folder.glob("*.safetensors"))


def forget(files: Sequence[Path]) -> None:
    """Ask the kernel to drop the files from its cache; it may decline, and `cached_share` says whether it did."""
    for path in files:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def cached_share(files: Sequence[Path]) -> float | None:
    """Share of sampled pages, one in each piece, that the kernel has in memory; None where it does not tell."""
    held = [_is_cached(path, start) for path, start in _pieces(files)]
    told = [one for one in held if one is not None]
    return sum(told) / len(told) if told else None


def _is_cached(path: Path, start: int) -> bool | None:
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(handle, [bytearray(1)], start, os.RWF_NOWAIT) == 1
    except BlockingIOError:
        return False
    except OSError:
        return None
    finally:
        os.close(handle)


def read_seconds(files: Sequence[Path]) -> float:
    """Seconds to read all files once, thrown away."""
    began = time.perf_counter()
    with ThreadPoolExecutor(READERS) as pool:
        for _ in pool.map(_read, _pieces(files)):
            pass
    return time.perf_counter() - began


def _read(piece: tuple[Path, int]) -> int:
    path, start = piece
    buffer = bytearray(PIECE_BYTES)
    handle = os.open(path, os.O_RDONLY)
    try:
        return os.preadv(handle, [buffer], start)
    finally:
        os.close(handle)


def _pieces(files: Sequence[Path]) -> list[tuple[Path, int]]:
    return [(path, start) for path in files for start in range(0, path.stat().st_size, PIECE_BYTES)]
