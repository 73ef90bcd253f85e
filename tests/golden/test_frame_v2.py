"""Frames of version 2, as first written: what was written then is read now."""

import pytest

from forkpoint.statestore.codec import HEADER_BYTES, Codec, decode, digest_of, encode
from tests.golden.make_frame_v2 import FOLDER, files


@pytest.mark.parametrize("name", sorted(files()))
def test_frames_of_version_2_are_read(name: str) -> None:
    raw, item_bytes = files()[name]
    stored = (FOLDER / name).read_bytes()
    assert stored[:8] == b"FPBF\x02\x02" + bytes([item_bytes, 0])
    assert decode(digest_of(raw), stored, len(raw)) == raw


@pytest.mark.parametrize("name", sorted(files()))
def test_the_lower_planes_lie_before_the_compressed_one(name: str) -> None:
    raw, item_bytes = files()[name]
    stored = (FOLDER / name).read_bytes()
    items = len(raw) // item_bytes
    for plane in range(item_bytes - 1):
        assert stored[HEADER_BYTES + plane * items :][:items] == raw[plane::item_bytes]
    assert stored[HEADER_BYTES + (item_bytes - 1) * items :][:4] == b"\x28\xb5\x2f\xfd", "a zstd frame"


def test_what_version_1_can_hold_is_still_written_as_version_1() -> None:
    for raw in (b"", bytes(4096), bytes(range(256))):
        assert encode(raw, 4)[4:8] in (bytes([1, Codec.RAW, 0, 0]), bytes([1, Codec.ZSTD, 0, 0]))
