"""How a blob lies in Redis: names of keys, and the header that makes it exist. docs/formats.md has the bytes."""

import re
import struct
from dataclasses import dataclass
from typing import Final
from zlib import crc32

from forkpoint.statestore.codec import HEADER_BYTES, RAW_BYTES_MAX
from forkpoint.statestore.redis.keys import PREFIX

CHUNK_BYTES: Final = 1024 * 1024
"""Small enough that a server's other clients do not notice; one value of 443 MB stalls them for seconds."""
CHUNK_BYTES_LEAST: Final = 64 * 1024
"""Smaller chunks than that are no writer's: a header can't make a reader ask for millions."""
FRAME_BYTES_MAX: Final = RAW_BYTES_MAX + HEADER_BYTES
GROUPS: Final = 4096
"""Slots of a cluster that blobs are spread over: a digest's first three characters are its hash tag, so that the few
keys which say who may delete need be only so many."""
UPLOAD: Final = re.compile(r"[0-9a-f]{16}\Z")
_HEADER: Final = struct.Struct("<4sBBHIQ8s")
_CRC: Final = struct.Struct("<I")
_MAGIC: Final = b"FPBR"
_VERSION: Final = 1


class BlobKeys:
    """Keys of one namespace's blobs."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    @property
    def tier(self) -> str:
        """Holds the store's identity."""
        return f"{PREFIX}{{{self._namespace}:blobs}}:tier"

    def fence(self, group: str) -> str:
        """Holds the least term that may delete blobs of a group: three hex characters."""
        return f"{PREFIX}{{{self._namespace}:b:{group}}}:fence"

    def header(self, digest: str) -> str:
        """Is there when the blob is."""
        return f"{PREFIX}{{{self._namespace}:b:{digest[:3]}}}:{digest}"

    def chunks(self, digest: str, header: "BlobHeader") -> list[str]:
        """Keys of a frame's chunks, in order."""
        return [f"{self.header(digest)}:{header.upload}:{number}" for number in range(header.chunks)]

    @property
    def headers_pattern(self) -> str:
        """What SCAN matches to find every header."""
        return f"{PREFIX}{{{_escaped(self._namespace)}:b:???}}:{'?' * 64}"

    @property
    def chunks_pattern(self) -> str:
        """What SCAN matches to find every chunk."""
        return f"{self.headers_pattern}:*"


def digest_of_key(key: str) -> str:
    """The digest in the name of a header or chunk."""
    return key.partition("}:")[2][:64]


def upload_of_key(key: str) -> str:
    """The upload in the name of a chunk."""
    return key.split(":")[-2]


@dataclass(frozen=True, slots=True)
class BlobHeader:
    """What a header says: which upload's chunks are the frame."""

    upload: str
    """16 hex characters, fresh for every upload."""
    frame_bytes: int
    chunk_bytes: int = CHUNK_BYTES
    """Of every chunk but the last."""

    @property
    def chunks(self) -> int:
        """Number of chunks; an empty frame has none."""
        return -(-self.frame_bytes // self.chunk_bytes)

    def pack(self) -> bytes:
        """The header's value."""
        fields = (_MAGIC, _VERSION, 0, 0, self.chunk_bytes, self.frame_bytes, bytes.fromhex(self.upload))
        packed = _HEADER.pack(*fields)
        return packed + _CRC.pack(crc32(packed))

    @staticmethod
    def unpack(value: bytes) -> "BlobHeader | None":
        """The header in a value; None when it is none, or one that no writer makes."""
        if len(value) != _HEADER.size + _CRC.size or _CRC.unpack_from(value, _HEADER.size)[0] != crc32(value[:-4]):
            return None
        magic, version, zero, zeros, chunk_bytes, frame_bytes, upload = _HEADER.unpack_from(value)
        if (magic, version, zero, zeros) != (_MAGIC, _VERSION, 0, 0):
            return None
        if not CHUNK_BYTES_LEAST <= chunk_bytes <= FRAME_BYTES_MAX or frame_bytes > FRAME_BYTES_MAX:
            return None
        return BlobHeader(upload.hex(), frame_bytes, chunk_bytes)


def _escaped(text: str) -> str:
    """`text` as a pattern that matches nothing else."""
    return re.sub(r"([\\\[\]*?^])", r"\\\1", text)
