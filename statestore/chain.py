"""The head hash: a BLAKE3 chain over token ids, one link a tile of 16.

h(0)     = BLAKE3(uint32 LE length of namespace, UTF-8 namespace, 32-byte model digest, 32-byte tokenizer digest)
h(16j)   = BLAKE3(h(16j - 16), 16 token ids as uint32 LE)
head_hash(p) = h(p) on the grid, else BLAKE3(h(16 * (p // 16)), the p % 16 tail ids as uint32 LE)

It depends on token ids alone, so that a checkpoint found under (position, h) serves every branch with that prefix.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Final

from blake3 import blake3

from forkpoint.limits import DIGEST_BYTES, TILE_TOKENS
from forkpoint.statestore.records import StoreMarker

TOKEN_BYTES: Final = 4
TILE_BYTES: Final = TILE_TOKENS * TOKEN_BYTES


def pack_tokens(token_ids: Iterable[int]) -> bytes:
    """Token ids as uint32 little-endian. Raises OverflowError for an id outside [0, 2^32)."""
    packed = array("I", token_ids)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(data: bytes) -> list[int]:
    """The ids in uint32 little-endian bytes."""
    packed = array("I", data)
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tolist()


def root_hash(marker: StoreMarker) -> bytes:
    """h(0) of every chain in a store."""
    if len(marker.model_digest) != DIGEST_BYTES or len(marker.tokenizer_digest) != DIGEST_BYTES:
        raise ValueError("model and tokenizer digests are 32 bytes each")
    namespace = marker.namespace.encode()
    length = len(namespace).to_bytes(4, "little")
    return blake3(length + namespace + marker.model_digest + marker.tokenizer_digest).digest()


class HashChain:
    """The chain up to one position: the last link on the grid and the packed ids of the open tile behind it."""

    __slots__ = ("grid_hash", "position", "tail")

    def __init__(self, position: int, grid_hash: bytes, tail: bytes = b"") -> None:
        if len(tail) != position % TILE_TOKENS * TOKEN_BYTES or len(grid_hash) != DIGEST_BYTES:
            raise ValueError(f"no chain at position {position}: {len(tail)} tail bytes, {len(grid_hash)} hash bytes")
        self.position = position
        self.grid_hash = grid_hash
        self.tail = tail

    @classmethod
    def root(cls, marker: StoreMarker) -> "HashChain":
        """The chain of the empty log."""
        return cls(0, root_hash(marker))

    @property
    def grid_position(self) -> int:
        """The last grid point, at which `grid_hash` was taken."""
        return self.position - self.position % TILE_TOKENS

    def copy(self) -> "HashChain":
        """An independent chain at the same position."""
        return HashChain(self.position, self.grid_hash, self.tail)

    def extend_packed(self, packed: bytes) -> None:
        """Go on by ids packed as uint32 little-endian."""
        self.position += len(packed) // TOKEN_BYTES
        data = self.tail + packed
        whole = len(data) - len(data) % TILE_BYTES
        link = self.grid_hash
        for offset in range(0, whole, TILE_BYTES):
            link = blake3(link + data[offset : offset + TILE_BYTES]).digest()
        self.grid_hash = link
        self.tail = data[whole:]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Go on by token ids."""
        self.extend_packed(pack_tokens(token_ids))

    def head_hash(self) -> bytes:
        """head_hash(position): 32 bytes."""
        return blake3(self.grid_hash + self.tail).digest() if self.tail else self.grid_hash


def grid_hashes(root: bytes, token_ids: Sequence[int], start: int = 0) -> list[tuple[int, bytes]]:
    """(position, h(position)) of every grid point in [start, start + len(token_ids)], ascending.

    `root` is h(start) and `start` lies on the grid, so the first pair is (start, root).
    """
    if start % TILE_TOKENS:
        raise ValueError(f"{start} is not on the grid")
    data = pack_tokens(token_ids)
    link, points = root, [(start, root)]
    for offset in range(0, len(data) - TILE_BYTES + 1, TILE_BYTES):
        link = blake3(link + data[offset : offset + TILE_BYTES]).digest()
        points.append((start + (offset + TILE_BYTES) // TOKEN_BYTES, link))
    return points
