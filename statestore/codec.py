"""The frame around a blob's bytes: header, then the payload, raw or compressed.

Nothing in a frame is trusted: lengths are checked against what is there and against a bound before any memory is
taken, and the digest over the *raw* bytes is verified last, so that neither the codec nor the place matters.
Layout (little-endian): docs/formats.md.
"""

import struct
from enum import IntEnum
from typing import Final
from zlib import crc32

import zstandard
from blake3 import blake3

from forkpoint.errors import BlobDamagedError

MAGIC: Final = b"FPBF"
VERSION: Final = 1
RAW_BYTES_MAX: Final = 256 * 1024 * 1024
"""No part of a state comes near: one head group of a K3 layer is 0.8 MB, one page of all its MLA layers 1.8 MB."""
PAYS: Final = 0.95
"""zstd is kept when it leaves at most this share; below that, reading back costs more than the bytes saved."""
ZSTD_LEVEL: Final = 1
_HEADER: Final = struct.Struct("<4sBBHQQI")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size


class Codec(IntEnum):
    """How the payload holds the raw bytes."""

    RAW = 0
    ZSTD = 1


def digest_of(raw: bytes | memoryview) -> str:
    """BLAKE3 of raw bytes as 64 lower-case hex characters: the blob's name."""
    return blake3(raw).hexdigest()


def encode(raw: bytes | memoryview) -> bytes:
    """The frame of `raw`; compressed when that pays. Raises ValueError above RAW_BYTES_MAX."""
    size = len(raw) if isinstance(raw, bytes) else raw.nbytes
    if size > RAW_BYTES_MAX:
        raise ValueError(f"a blob holds at most {RAW_BYTES_MAX} bytes, got {size}")
    packed = zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(raw)
    if len(packed) <= PAYS * size:
        codec, payload = Codec.ZSTD, packed
    else:
        codec, payload = Codec.RAW, bytes(raw)
    header = _HEADER.pack(MAGIC, VERSION, codec, 0, size, len(payload), crc32(payload))
    return header + _CRC.pack(crc32(header)) + payload


def decode(digest: str, frame: bytes, expected_bytes: int | None = None) -> bytes:
    """The raw bytes whose BLAKE3 is `digest`. Raises BlobDamagedError on anything else, without trusting a length."""
    if len(frame) < HEADER_BYTES:
        raise BlobDamagedError(digest, f"{len(frame)} bytes are no frame")
    magic, version, codec, reserved, raw_bytes, payload_bytes, payload_crc = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise BlobDamagedError(digest, "not a frame: wrong magic")
    if _CRC.unpack_from(frame, _HEADER.size)[0] != crc32(frame[: _HEADER.size]):
        raise BlobDamagedError(digest, "header checksum differs")
    if version != VERSION or reserved != 0:
        raise BlobDamagedError(digest, f"frame version {version}.{reserved} is unknown, this process reads {VERSION}.0")
    if payload_bytes != len(frame) - HEADER_BYTES:
        raise BlobDamagedError(digest, f"{len(frame) - HEADER_BYTES} payload bytes, the header says {payload_bytes}")
    if raw_bytes > RAW_BYTES_MAX or (expected_bytes is not None and raw_bytes != expected_bytes):
        raise BlobDamagedError(digest, f"{raw_bytes} raw bytes, expected {expected_bytes or f'<= {RAW_BYTES_MAX}'}")
    payload = frame[HEADER_BYTES:]
    if crc32(payload) != payload_crc:
        raise BlobDamagedError(digest, "payload checksum differs")
    if codec == Codec.RAW:
        raw = payload
    elif codec == Codec.ZSTD:
        raw = _decompress(digest, payload, raw_bytes)
    else:
        raise BlobDamagedError(digest, f"codec {codec} is unknown")
    if len(raw) != raw_bytes:
        raise BlobDamagedError(digest, f"{len(raw)} raw bytes, the header says {raw_bytes}")
    if digest_of(raw) != digest:
        raise BlobDamagedError(digest, "content digest differs")
    return raw


def _decompress(digest: str, payload: bytes, raw_bytes: int) -> bytes:
    """Decompress exactly `raw_bytes`; the size inside the zstd frame must agree before a byte is allocated."""
    try:
        if zstandard.frame_content_size(payload) != raw_bytes:
            raise BlobDamagedError(digest, "the compressed frame holds another size than the header says")
        return zstandard.ZstdDecompressor().decompress(payload, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BlobDamagedError(digest, f"zstd: {error}") from error
