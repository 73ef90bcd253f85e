"""Where stores lie in these benchmarks: Redis-compatible servers of this process's own, and the disk itself."""

import mmap
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.redis_servers import RedisServerProcess, binary, redis_server

PRODUCTS: Final = {"valkey": "Valkey", "redis": "Redis"}
ALWAYS: Final = ("--appendonly", "yes", "--appendfsync", "always")
EVERYSEC: Final = ("--appendonly", "yes", "--appendfsync", "everysec")
BLOCK: Final = 4 << 20


@contextmanager
def server(product: str, folder: Path, *options: str) -> Iterator[RedisServerProcess | None]:
    """A server whose files lie in `folder`, None when it is not installed."""
    if binary(product) is None:
        yield None
        return
    folder.mkdir()
    with redis_server(product, *options, "--dir", str(folder)) as process:
        yield process


def sync_ms(folder: Path, count: int = 300) -> list[float]:
    """Milliseconds to append 4 KiB to a file and sync it: what no durable commit can be faster than."""
    path, page, times = folder / "sync-probe", bytes(4096), []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(descriptor, bytes(4096 * count))
        os.fsync(descriptor)
        os.lseek(descriptor, 0, os.SEEK_SET)
        for _ in range(count):
            began = time.perf_counter()
            os.write(descriptor, page)
            os.fdatasync(descriptor)
            times.append((time.perf_counter() - began) * 1e3)
    finally:
        os.close(descriptor)
        path.unlink()
    return times


def disk_rates(folder: Path, size: int, rounds: int) -> tuple[float, float]:
    """(write, read) of the disk in GB/s: sequential, 4 MiB at a time, past the page cache; the median of some rounds.

    The write is synced. A file system that has no O_DIRECT is written through the cache and synced, and read after it
    was dropped from the cache.
    """
    buffer = mmap.mmap(-1, BLOCK)
    buffer.write(os.urandom(BLOCK))
    writes, reads, path = [], [], folder / "disk-probe"
    for _ in range(rounds):
        began = time.perf_counter()
        descriptor = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for _ in range(size // BLOCK):
            os.write(descriptor, buffer)
        os.fdatasync(descriptor)
        os.close(descriptor)
        writes.append(size / (time.perf_counter() - began) / 1e9)
        forget(path)
        began = time.perf_counter()
        descriptor = _open(path, os.O_RDONLY)
        while os.readv(descriptor, [buffer]) == BLOCK:
            pass
        os.close(descriptor)
        reads.append(size / (time.perf_counter() - began) / 1e9)
        path.unlink()
    return statistics.median(writes), statistics.median(reads)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_DIRECT)
    except OSError:
        return os.open(path, flags)


def forget(path: Path) -> None:
    """Drop a file's pages from the cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
