"""Frames: what is damaged is never decoded."""

import os
import struct
from pathlib import Path
from zlib import crc32

import pytest
import zstandard

from forkpoint.errors import BlobDamagedError
from forkpoint.statestore.codec import HEADER_BYTES, RAW_BYTES_MAX, Codec, decode, digest_of, encode

NOISE = os.urandom(700)
ZEROS = bytes(20_000)


@pytest.mark.parametrize("raw", [b"", b"x", NOISE, ZEROS, NOISE * 500])
def test_bytes_come_back(raw: bytes) -> None:
    assert decode(digest_of(raw), encode(raw)) == raw
    assert decode(digest_of(raw), encode(memoryview(raw)), len(raw)) == raw


def test_zstd_is_used_only_when_it_pays() -> None:
    assert encode(NOISE)[5] == Codec.RAW
    assert encode(ZEROS)[5] == Codec.ZSTD
    assert len(encode(ZEROS)) < 100
    assert len(encode(NOISE)) == HEADER_BYTES + len(NOISE)


@pytest.mark.parametrize("raw", [NOISE[:90], b"compressible " * 30], ids=["raw", "zstd"])
def test_every_flipped_bit_of_a_frame_is_detected(raw: bytes) -> None:
    frame, digest = encode(raw), digest_of(raw)
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlobDamagedError):
            decode(digest, bytes(damaged))


@pytest.mark.parametrize("raw", [NOISE[:90], b"compressible " * 30], ids=["raw", "zstd"])
def test_every_truncation_and_extension_of_a_frame_is_detected(raw: bytes) -> None:
    frame, digest = encode(raw), digest_of(raw)
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


def frame(codec: int, raw_bytes: int, payload: bytes, version: int = 1) -> bytes:
    """A frame with right checksums and any lies inside."""
    header = struct.pack("<4sBBHQQI", b"FPBF", version, codec, 0, raw_bytes, len(payload), crc32(payload))
    return header + struct.pack("<I", crc32(header)) + payload


def test_a_frame_that_claims_huge_lengths_takes_no_memory() -> None:
    bomb = zstandard.ZstdCompressor(level=19, write_content_size=True).compress(bytes(64 << 20))
    for raw_bytes in (RAW_BYTES_MAX + 1, 2**63, 100):
        with pytest.raises(BlobDamagedError):
            decode(digest_of(b""), frame(Codec.ZSTD, raw_bytes, bomb))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    with pytest.raises(BlobDamagedError):
        decode(digest_of(bytes(1000)), frame(Codec.ZSTD, 1000, unsized))


def test_unknown_codecs_and_versions_are_refused() -> None:
    with pytest.raises(BlobDamagedError, match="codec 7"):
        decode(digest_of(b"abc"), frame(7, 3, b"abc"))
    with pytest.raises(BlobDamagedError, match="version 2"):
        decode(digest_of(b"abc"), frame(Codec.RAW, 3, b"abc", version=2))


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
