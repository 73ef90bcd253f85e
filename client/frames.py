"""Exports in files: frames of a uint32 little-endian length and a serialised ExportChunk."""

import struct
from collections.abc import AsyncIterator, Iterator
from typing import BinaryIO, Final

from google.protobuf.message import DecodeError

from forkpoint.limits import MESSAGE_BYTES_MAX
from forkpoint.proto.forkpoint.v1.export_pb2 import ExportChunk

_LENGTH: Final = struct.Struct("<I")


def frame(chunk: ExportChunk) -> bytes:
    """One frame."""
    data = chunk.SerializeToString()
    return _LENGTH.pack(len(data)) + data


def read_frames(file: BinaryIO) -> Iterator[ExportChunk]:
    """The chunks of an export file. Raises ValueError for a file that is cut off or no export."""
    while length := file.read(_LENGTH.size):
        if len(length) < _LENGTH.size:
            raise ValueError("the export is cut off inside a frame's length")
        (size,) = _LENGTH.unpack(length)
        if size > MESSAGE_BYTES_MAX:
            raise ValueError(f"a frame of {size} bytes: this is no export")
        data = file.read(size)
        if len(data) < size:
            raise ValueError("the export is cut off inside a frame")
        try:
            yield ExportChunk.FromString(data)
        except DecodeError as error:
            raise ValueError("a frame holds no export chunk") from error


async def chunks_of(file: BinaryIO) -> AsyncIterator[ExportChunk]:
    """As read_frames, for Sessions.import_."""
    for chunk in read_frames(file):
        yield chunk
