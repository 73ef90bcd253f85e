"""Frames: what is damaged is never decoded."""

import os
import random
import struct
import tracemalloc
from pathlib import Path
from zlib import crc32

import pytest
import zstandard

from forkpoint.errors import BlobDamagedError
from forkpoint.statestore.codec import HEADER_BYTES, RAW_BYTES_MAX, Codec, decode, digest_of, encode, encode_pieces
from forkpoint.statestore.planes import join, split

NOISE = os.urandom(700)
ZEROS = bytes(20_000)
RANDOM = random.Random(7)
FLOATS = struct.pack("<90000f", *(RANDOM.gauss(0, 1) for _ in range(90_000)))
HALVES = b"".join(FLOATS[index + 2 : index + 4] for index in range(0, len(FLOATS), 4))
"""FLOATS as bfloat16."""
SMALL = {"raw": (NOISE[:90], 1), "zstd": (b"compressible " * 30, 1), "planes": (FLOATS[:1200], 4)}


@pytest.mark.parametrize("raw", [b"", b"x", NOISE, ZEROS, NOISE * 500])
def test_bytes_come_back(raw: bytes) -> None:
    assert decode(digest_of(raw), encode(raw)) == raw
    assert decode(digest_of(raw), encode(memoryview(raw)), len(raw)) == raw


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("raw", [b"", b"xy", NOISE, NOISE[:-1], ZEROS, FLOATS, HALVES, FLOATS[:-2]], ids=len)
def test_items_of_any_size_come_back(raw: bytes, item_bytes: int) -> None:
    frame = encode(memoryview(raw), item_bytes)
    assert decode(digest_of(raw), frame, len(raw)) == raw
    assert decode(digest_of(raw), bytearray(frame)) == raw
    assert decode(digest_of(raw), memoryview(frame)) == raw


@pytest.mark.parametrize("items", [0, 1, 2, 1000])
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_planes_are_the_bytes_of_all_items_at_one_place(items: int, item_bytes: int) -> None:
    raw = os.urandom(items * item_bytes)
    planes = split(memoryview(raw), item_bytes)
    assert planes == [bytes(raw[i * item_bytes + plane] for i in range(items)) for plane in range(item_bytes)]
    assert join(planes) == raw


@pytest.mark.parametrize(("raw", "item_bytes", "share"), [(FLOATS, 4, 0.88), (HALVES, 2, 0.76)], ids=["fp32", "bf16"])
def test_floats_are_stored_by_planes_when_that_leaves_least(raw: bytes, item_bytes: int, share: float) -> None:
    frame = encode(raw, item_bytes)
    assert frame[4:8] == bytes([2, Codec.PLANES, item_bytes, 0])
    assert len(frame) < min(share * len(raw), len(encode(raw)))


def test_nothing_is_compressed_when_that_is_not_wanted() -> None:
    for raw in (ZEROS, FLOATS):
        frame = b"".join(encode_pieces(raw, 4, compress=False))
        assert (frame[5], len(frame)) == (Codec.RAW, HEADER_BYTES + len(raw))
        assert decode(digest_of(raw), frame) == raw


def test_zeros_among_floats_go_through_zstd_as_they_lie() -> None:
    assert encode(bytes(len(FLOATS)), 4)[5] == Codec.ZSTD


def test_what_is_stored_raw_is_not_copied() -> None:
    noise = bytearray(os.urandom(1 << 20))
    pieces = encode_pieces(memoryview(noise), 4)
    noise[0] ^= 255
    assert [len(piece) for piece in pieces] == [HEADER_BYTES, len(noise)]
    assert pieces[1] == noise, "the piece shows what the caller's memory holds now"
    frame = b"".join(pieces[:1]) + bytes([noise[0] ^ 255]) + bytes(noise[1:])
    raw = decode(digest_of(frame[HEADER_BYTES:]), frame)
    assert isinstance(raw, memoryview) and raw.obj is frame


def test_zstd_is_used_only_when_it_pays() -> None:
    assert encode(NOISE)[5] == Codec.RAW
    assert encode(ZEROS)[5] == Codec.ZSTD
    assert len(encode(ZEROS)) < 100
    assert len(encode(NOISE)) == HEADER_BYTES + len(NOISE)


@pytest.mark.parametrize("codec", SMALL)
def test_every_flipped_bit_of_a_frame_is_detected(codec: str) -> None:
    raw, item_bytes = SMALL[codec]
    frame, digest = encode(raw, item_bytes), digest_of(raw)
    assert frame[5] == Codec[codec.upper()]
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlobDamagedError):
            decode(digest, bytes(damaged))


@pytest.mark.parametrize("codec", SMALL)
def test_every_truncation_and_extension_of_a_frame_is_detected(codec: str) -> None:
    raw, item_bytes = SMALL[codec]
    frame, digest = encode(raw, item_bytes), digest_of(raw)
    for length in range(len(frame)):
        with pytest.raises(BlobDamagedError):
            decode(digest, frame[:length])
    for tail in (b"\0", frame, NOISE):
        with pytest.raises(BlobDamagedError):
            decode(digest, frame + tail)


def test_a_whole_frame_under_another_digest_is_detected() -> None:
    with pytest.raises(BlobDamagedError, match="content digest"):
        decode(digest_of(b"other"), encode(b"this"))
    with pytest.raises(BlobDamagedError, match="expected 5"):
        decode(digest_of(b"this"), encode(b"this"), 5)


def frame(codec: int, raw_bytes: int, payload: bytes, version: int = 1, items: int = 0) -> bytes:
    """A frame with right checksums and any lies inside."""
    header = struct.pack("<4sBBHQQI", b"FPBF", version, codec, items, raw_bytes, len(payload), crc32(payload))
    return header + struct.pack("<I", crc32(header)) + payload


def zstd_frame_of(size: int, block: bytes) -> bytes:
    """A zstd frame that states a content size, whatever its only block holds."""
    last_block = (len(block) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd" + bytes([0b10100000]) + struct.pack("<I", size) + last_block + block


def test_a_frame_that_claims_huge_lengths_takes_no_memory() -> None:
    bomb = zstandard.ZstdCompressor(level=19, write_content_size=True).compress(bytes(64 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    liar = zstd_frame_of(RAW_BYTES_MAX, b"abc")
    assert zstandard.frame_content_size(liar) == RAW_BYTES_MAX
    lies = [
        *(frame(Codec.ZSTD, raw_bytes, bomb) for raw_bytes in (RAW_BYTES_MAX + 1, 2**63, 100)),
        frame(Codec.ZSTD, 1000, unsized),
        frame(Codec.ZSTD, RAW_BYTES_MAX, liar),
        frame(Codec.PLANES, RAW_BYTES_MAX, liar, 2, 4),
        frame(Codec.PLANES, RAW_BYTES_MAX, bomb, 2, 2),
        frame(Codec.PLANES, 64, bytes(48) + liar, 2, 4),
        frame(Codec.PLANES, 64, bytes(47), 2, 4),
        frame(Codec.RAW, RAW_BYTES_MAX, b"abc"),
    ]
    tracemalloc.start()
    try:
        for lie in lies:
            with pytest.raises(BlobDamagedError):
                decode(digest_of(b""), lie)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_true_frame_of_nothing_but_zeros_is_read_however_small_it_is() -> None:
    zeros = bytes(RAW_BYTES_MAX // 4)
    small = encode(zeros)
    assert len(small) < len(zeros) / 30_000
    assert decode(digest_of(zeros), small) == zeros


def test_unknown_codecs_and_versions_are_refused() -> None:
    digest = digest_of(b"abcd")
    with pytest.raises(BlobDamagedError, match="codec 7"):
        decode(digest, frame(7, 4, b"abcd"))
    with pytest.raises(BlobDamagedError, match="version 3"):
        decode(digest, frame(Codec.RAW, 4, b"abcd", version=3))
    for codec, version in ((Codec.PLANES, 1), (Codec.RAW, 2), (Codec.ZSTD, 2)):
        with pytest.raises(BlobDamagedError, match=f"in frames of version {version}"):
            decode(digest, frame(codec, 4, b"abcd", version))
    for items in (0, 1, 3, 8, 0x0104):
        with pytest.raises(BlobDamagedError, match="no items"):
            decode(digest, frame(Codec.PLANES, 4, b"abcd", 2, items))
    with pytest.raises(BlobDamagedError, match="no items"):
        decode(digest, frame(Codec.PLANES, 6, b"abcdef", 2, 4))
    with pytest.raises(BlobDamagedError, match="no items"):
        decode(digest, frame(Codec.RAW, 4, b"abcd", items=2))


def test_a_pickle_in_place_of_a_frame_is_rejected_and_not_run(tmp_path: Path) -> None:
    sign = tmp_path / "it-ran"
    payload = f"cposix\nsystem\n(S'touch {sign}'\ntR.".encode()
    for digest in (digest_of(payload), digest_of(b"")):
        with pytest.raises(BlobDamagedError):
            decode(digest, payload)
    assert decode(digest_of(payload), encode(payload)) == payload
    assert not sign.exists()


def test_what_is_larger_than_the_bound_is_not_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forkpoint.statestore.codec.RAW_BYTES_MAX", 10)
    with pytest.raises(ValueError, match="at most 10"):
        encode(bytes(11))
