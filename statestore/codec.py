"""The frame around a blob's bytes: header, then the payload, raw or compressed.

Nothing in a frame is trusted: lengths are checked against what is there and against a bound before any memory is
taken, and the digest over the *raw* bytes is verified last, so that neither the codec nor the place matters.
Layout (little-endian): docs/formats.md.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final
from zlib import crc32

import zstandard
from blake3 import blake3

from forkpoint.errors import BlobDamagedError
from forkpoint.statestore.blobs import Buffer
from forkpoint.statestore.planes import join, split

MAGIC: Final = b"FPBF"
RAW_BYTES_MAX: Final = 256 * 1024 * 1024
"""No part of a state comes near: one head group of a K3 layer is 0.8 MB, one page of all its MLA layers 1.8 MB."""
PAYS: Final = 0.95
"""A codec is kept when it leaves at most this share; below that, reading back costs more than the bytes saved."""
ZSTD_LEVEL: Final = 1
PLANE_ZSTD: Final = zstandard.ZstdCompressionParameters(
    window_log=17,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    strategy=zstandard.STRATEGY_FAST,
    write_content_size=True,
)
"""For a plane of exponents: its entropy is low and only runs repeat. The short matches that level 1 finds by chance are
no gain: looking for long ones only, and barely, took 0.4 of its time and left 0.88 of its bytes."""
ZSTD_SHRINKS_MAX: Final = 32_768
"""zstd's shortest block is 4 bytes and stands for 128 KiB at most, so no payload holds more than this many times its
own bytes."""
SAMPLED_ABOVE_BYTES: Final = 256 * 1024
"""Larger blobs are compressed only as a sample of them promises to pay: trying costs as long as doing."""
SAMPLES: Final = 8
SAMPLE_BYTES: Final = 8 * 1024
SAMPLE_SLACK: Final = 0.02
"""What a sample may promise too little."""
_HEADER: Final = struct.Struct("<4sBBHQQI")
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = _HEADER.size + _CRC.size


class Codec(IntEnum):
    """How the payload holds the raw bytes."""

    RAW = 0
    ZSTD = 1
    PLANES = 2
    """All byte planes but the top one as they are, then the top one through zstd."""


VERSION_OF: Final = {Codec.RAW: 1, Codec.ZSTD: 1, Codec.PLANES: 2}
"""The version that first knew a codec; a frame states the least version that can read it."""


@dataclass(frozen=True, slots=True)
class _Header:
    """A header whose checksum, version and lengths are right."""

    codec: Codec
    item_bytes: int
    raw_bytes: int


def digest_of(raw: Buffer) -> str:
    """BLAKE3 of raw bytes as 64 lower-case hex characters: the blob's name."""
    return blake3(raw).hexdigest()


def encode(raw: Buffer, item_bytes: int = 1) -> bytes:
    """The frame of `raw` in one piece. See encode_pieces."""
    return b"".join(encode_pieces(raw, item_bytes))


def encode_pieces(raw: Buffer, item_bytes: int = 1, compress: bool = True) -> tuple[Buffer, ...]:
    """The frame of `raw` in pieces: what is stored raw stays where it lies. Compressed when that pays; by planes only
    if `item_bytes` (2 or 4) says of what; not at all unless `compress`. Raises ValueError above RAW_BYTES_MAX."""
    view = memoryview(raw).cast("B")
    if view.nbytes > RAW_BYTES_MAX:
        raise ValueError(f"a blob holds at most {RAW_BYTES_MAX} bytes, got {view.nbytes}")
    codec: Codec = Codec.RAW
    payload: tuple[Buffer, ...] = (view,)
    for candidate in _candidates(view, item_bytes) if compress else ():
        packed = _pack(candidate, view, item_bytes)
        if _size(packed) <= PAYS * view.nbytes and _size(packed) < _size(payload):
            codec, payload = candidate, packed
    check = 0
    for piece in payload:
        check = crc32(piece, check)
    items = item_bytes if codec is Codec.PLANES else 0
    header = _HEADER.pack(MAGIC, VERSION_OF[codec], codec, items, view.nbytes, _size(payload), check)
    return (header + _CRC.pack(crc32(header)), *payload)


def decode(digest: str, frame: Buffer, expected_bytes: int | None = None) -> bytes | bytearray | memoryview:
    """The raw bytes whose BLAKE3 is `digest`; of a raw payload a view into `frame`. Raises BlobDamagedError on anything
    else, without trusting a length."""
    header = _read_header(digest, frame, expected_bytes)
    payload = memoryview(frame)[HEADER_BYTES:]
    raw: bytes | bytearray | memoryview
    if header.codec is Codec.RAW:
        raw = payload
    elif header.codec is Codec.ZSTD:
        raw = _unzstd(digest, payload, header.raw_bytes)
    else:
        raw = _unplane(digest, payload, header)
    if len(raw) != header.raw_bytes:
        raise BlobDamagedError(digest, f"{len(raw)} raw bytes, the header says {header.raw_bytes}")
    if digest_of(raw) != digest:
        raise BlobDamagedError(digest, "content digest differs")
    return raw


def _read_header(digest: str, frame: Buffer, expected_bytes: int | None) -> _Header:
    """Everything in a frame that needs no memory: checksums, version, codec and lengths."""
    if len(frame) < HEADER_BYTES:
        raise BlobDamagedError(digest, f"{len(frame)} bytes are no frame")
    magic, version, codec, items, raw_bytes, payload_bytes, payload_crc = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise BlobDamagedError(digest, "not a frame: wrong magic")
    if _CRC.unpack_from(frame, _HEADER.size)[0] != crc32(memoryview(frame)[: _HEADER.size]):
        raise BlobDamagedError(digest, "header checksum differs")
    if version not in VERSION_OF.values():
        known = max(VERSION_OF.values())
        raise BlobDamagedError(digest, f"frame version {version} is unknown, this process reads 1 to {known}")
    if codec not in VERSION_OF or VERSION_OF[Codec(codec)] != version:
        raise BlobDamagedError(digest, f"codec {codec} is unknown in frames of version {version}")
    if items not in ((2, 4) if codec == Codec.PLANES else (0,)) or (items and raw_bytes % items):
        raise BlobDamagedError(digest, f"{raw_bytes} bytes are no items of {items} bytes")
    if payload_bytes != len(frame) - HEADER_BYTES:
        raise BlobDamagedError(digest, f"{len(frame) - HEADER_BYTES} payload bytes, the header says {payload_bytes}")
    if raw_bytes > RAW_BYTES_MAX or (expected_bytes is not None and raw_bytes != expected_bytes):
        raise BlobDamagedError(digest, f"{raw_bytes} raw bytes, expected {expected_bytes or f'<= {RAW_BYTES_MAX}'}")
    if crc32(memoryview(frame)[HEADER_BYTES:]) != payload_crc:
        raise BlobDamagedError(digest, "payload checksum differs")
    return _Header(Codec(codec), items, raw_bytes)


def _candidates(view: memoryview, item_bytes: int) -> Sequence[Codec]:
    """Codecs worth trying on the whole of `view`: all of them when it is small, else the one a sample speaks for."""
    codecs = [Codec.ZSTD]
    if item_bytes > 1 and view.nbytes and view.nbytes % item_bytes == 0:
        codecs.append(Codec.PLANES)
    if view.nbytes <= SAMPLED_ABOVE_BYTES:
        return codecs
    stride = (view.nbytes - SAMPLE_BYTES) // (SAMPLES - 1) // SAMPLES * SAMPLES  # whole items whatever their size
    sample = memoryview(b"".join(view[i * stride : i * stride + SAMPLE_BYTES] for i in range(SAMPLES)))
    size, best = min((_size(_pack(codec, sample, item_bytes)), codec) for codec in codecs)
    return [best] if size <= (PAYS + SAMPLE_SLACK) * sample.nbytes else []


def _pack(codec: Codec, view: memoryview, item_bytes: int) -> tuple[Buffer, ...]:
    """The payload of `view`, in pieces."""
    if codec is Codec.ZSTD:
        return (_zstd(view),)
    *low, top = split(view, item_bytes)
    return (*low, zstandard.ZstdCompressor(compression_params=PLANE_ZSTD).compress(top))


def _zstd(data: Buffer) -> bytes:
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_content_size=True).compress(data)


def _size(pieces: Sequence[Buffer]) -> int:
    return sum(map(len, pieces))


def _unplane(digest: str, payload: memoryview, header: _Header) -> bytearray:
    """The items whose planes the payload holds."""
    items = header.raw_bytes // header.item_bytes
    low_bytes = items * (header.item_bytes - 1)
    if len(payload) < low_bytes:
        raise BlobDamagedError(digest, f"{len(payload)} payload bytes can't hold {low_bytes} of the lower planes")
    low = [payload[start : start + items] for start in range(0, low_bytes, items)] if items else []
    return join([*low, _unzstd(digest, payload[low_bytes:], items)])


def _unzstd(digest: str, payload: Buffer, raw_bytes: int) -> bytes:
    """Decompress exactly `raw_bytes`; the size inside the zstd frame must agree before a byte is allocated."""
    try:
        if zstandard.frame_content_size(payload) != raw_bytes:
            raise BlobDamagedError(digest, "the compressed frame holds another size than the header says")
        if raw_bytes > ZSTD_SHRINKS_MAX * len(payload):
            raise BlobDamagedError(digest, f"{len(payload)} compressed bytes can't hold {raw_bytes}")
        return zstandard.ZstdDecompressor().decompress(payload, max_output_size=raw_bytes, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise BlobDamagedError(digest, f"zstd: {error}") from error
