"""Shard: one safetensors file. Its header is checked as a whole; a tensor's bytes are mapped when it is asked for.

Format: uint64 length of the header, the header (a JSON object: name to dtype, shape and [begin, end) in the data), then
the data, tensor after tensor without gaps. The safetensors package says neither where a tensor lies nor all that is
wrong with a file, so the header is read here.
"""

import json
import math
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, TypeVar

import torch
from torch import Tensor

LENGTH_BYTES: Final = 8
HEADER_BYTES_MAX: Final = 100_000_000
"""As in the safetensors package: a longer header is no header."""
DTYPES: Final = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

T = TypeVar("T")


class ShardError(Exception):
    """A file whose tensors can't be told apart; the message names the file and says why."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What is known of a stored tensor before it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a file: `begin` counts bytes from the file's start."""

    spec: TensorSpec
    begin: int


@dataclass(frozen=True, slots=True)
class Shard:
    """`entries` by name; `problems` of single tensors, whose names are `unreadable`. No file stays open."""

    path: Path
    entries: dict[str, Entry]
    problems: list[str]
    unreadable: frozenset[str]
    _identity: tuple[int, ...]

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read the header. Raises ShardError when the file is missing, cut off, or has no header that makes sense."""
        data, raw, identity = _with_file(path, lambda fd: _header(fd, path.name))
        entries: dict[str, Entry] = {}
        problems: list[str] = []
        unreadable: set[str] = set()
        for name, fields in raw.items():
            try:
                entries[name] = _entry(fields, data)
            except ValueError as error:
                problems.append(f"{name} in {path.name} {error}")
                unreadable.add(name)
        if not unreadable:
            _check_extent(path.name, entries, data, identity[2])
        return cls(path, entries, problems, frozenset(unreadable), identity)

    def read(self, name: str) -> Tensor:
        """The tensor, over a mapping of its bytes that lasts as long as the tensor; a copy on write, not to be written.

        Raises ShardError when the file is not the one that was opened.
        """
        entry = self.entries[name]
        nbytes, skip = entry.spec.nbytes, entry.begin % mmap.ALLOCATIONGRANULARITY
        if nbytes == 0:
            return torch.empty(entry.spec.shape, dtype=entry.spec.dtype)

        def map_bytes(fd: int) -> mmap.mmap:
            if _identity(fd) != self._identity:
                raise ShardError(f"{self.path.name} was changed while it was read")
            # Private, for torch takes no read-only buffer without a warning; it is never written, so never copied.
            return mmap.mmap(fd, nbytes + skip, access=mmap.ACCESS_COPY, offset=entry.begin - skip)

        mapping = _with_file(self.path, map_bytes)
        mapping.madvise(mmap.MADV_WILLNEED)
        raw = torch.frombuffer(mapping, dtype=torch.uint8, count=nbytes, offset=skip)
        aligned = raw if entry.begin % entry.spec.dtype.itemsize == 0 else raw.clone()
        return aligned.view(entry.spec.dtype).view(entry.spec.shape)


def _with_file(path: Path, action: Callable[[int], T]) -> T:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise ShardError(f"{path.name} does not exist") from error
    except OSError as error:
        raise ShardError(f"{path.name} can't be read: {error.strerror}") from error
    try:
        return action(fd)
    except OSError as error:
        raise ShardError(f"{path.name} can't be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _identity(fd: int) -> tuple[int, ...]:
    stat = os.fstat(fd)
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _header(fd: int, name: str) -> tuple[int, dict[str, Any], tuple[int, ...]]:
    """Where the data begins, the header's tensors, and the file's identity."""
    identity = _identity(fd)
    size = identity[2]
    length = int.from_bytes(os.pread(fd, LENGTH_BYTES, 0), "little")
    if size < LENGTH_BYTES:
        raise ShardError(f"{name} is cut off: it has {size} bytes, less than a header's length takes")
    if length > HEADER_BYTES_MAX:
        raise ShardError(f"{name} can't be read: it is no safetensors file")
    if LENGTH_BYTES + length > size:
        raise ShardError(f"{name} is cut off: it has {size} bytes and a header of {length}")
    try:
        raw = json.loads(os.pread(fd, length, LENGTH_BYTES), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ShardError(f"{name} can't be read: its header is no JSON with each name once: {error}") from error
    if not isinstance(raw, dict):
        raise ShardError(f"{name} can't be read: its header is no JSON object")
    raw.pop("__metadata__", None)
    return LENGTH_BYTES + length, raw, identity


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object none of whose names comes twice."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} comes twice")
    return found


def _entry(fields: Any, data: int) -> Entry:
    """Raises ValueError, whose text goes on from the tensor's name."""
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError("has no dtype, shape and two data_offsets") from error
    if not all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in (*shape, begin)):
        raise ValueError(f"has shape {list(shape)} at {begin!r}, which are no sizes")
    if dtype not in DTYPES:
        raise ValueError(f"has dtype {dtype!r}, which is unknown here")
    spec = TensorSpec(DTYPES[dtype], shape)
    if end != begin + spec.nbytes:
        raise ValueError(f"has {spec.nbytes} bytes by its shape, and the offsets {begin} to {end}")
    return Entry(spec, data + begin)


def _check_extent(name: str, entries: dict[str, Entry], data: int, size: int) -> None:
    """Tensors lie end to end from `data` to the file's end. Raises ShardError."""
    at = data
    for tensor, begin, end in sorted(_places(entries), key=lambda place: place[1:]):
        if begin != at:
            raise ShardError(f"{name} can't be read: {tensor} begins at byte {begin}, the data before it ends at {at}")
        at = end
    if at > size:
        raise ShardError(f"{name} is cut off: it has {size} bytes of {at}")
    if at < size:
        raise ShardError(f"{name} can't be read: {size - at} bytes follow its last tensor")


def _places(entries: dict[str, Entry]) -> Iterator[tuple[str, int, int]]:
    for name, entry in entries.items():
        yield name, entry.begin, entry.begin + entry.spec.nbytes
