"""Exports in files: frames come back as they went in, and a file that is cut anywhere is said to be."""

import io

import pytest

from forkpoint.client.frames import chunks_of, frame, read_frames
from forkpoint.proto.forkpoint.v1.export_pb2 import ExportChunk, ExportHeader, ExportSlice, ExportTrailer
from tests.support.rpc_site import Served

CHUNKS = [
    ExportChunk(header=ExportHeader(format_version=1, head=3)),
    ExportChunk(slice=ExportSlice(start=0, token_ids=[1, 2, 300])),
    ExportChunk(trailer=ExportTrailer(head=3)),
]


def test_frames_come_back_as_they_went_in() -> None:
    data = b"".join(frame(chunk) for chunk in CHUNKS)
    assert list(read_frames(io.BytesIO(data))) == CHUNKS


def test_a_file_that_is_cut_inside_a_frame_is_refused() -> None:
    data = b"".join(frame(chunk) for chunk in CHUNKS)
    borders = {0, *(sum(len(frame(chunk)) for chunk in CHUNKS[:count]) for count in (1, 2, 3))}
    for size in range(len(data)):
        if size in borders:
            continue
        with pytest.raises(ValueError, match="cut off"):
            list(read_frames(io.BytesIO(data[:size])))


def test_a_file_that_is_no_export_is_refused() -> None:
    for data in (b"\xff\xff\xff\xff", frame(CHUNKS[0])[:4] + b"\xff" * 10):
        with pytest.raises(ValueError, match="no export"):
            list(read_frames(io.BytesIO(data)))


async def test_a_session_goes_through_a_file(site: Served) -> None:
    session = await site.session(text="hello")
    data = b"".join([frame(chunk) async for chunk in session.export()])
    copy = await site.client.sessions.import_("w", chunks_of(io.BytesIO(data)), "copy")
    assert (await copy.tokens().result()).text == b"hello"
