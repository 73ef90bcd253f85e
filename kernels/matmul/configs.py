"""Pinned tiles of the row-invariant product: no timing at run time picks one, so two machines pick the same.

BLOCK_K and the form of the product decide the bits of a row and are constants. What a `Tile` holds decides only
which program owns an element, so it may follow the number of rows. That equal bits come out of every tile here is
to be shown on the hardware (`python -m benchmarks.rows` compares them), never assumed.
"""

from dataclasses import dataclass
from typing import Final

BLOCK_K: Final = 64
"""Inner step of bf16 products: 128 bytes, one swizzled line of shared memory."""
BLOCK_K_FP32: Final = 32
"""Inner step of fp32 products."""
SHARED_BYTES_MAX: Final = 232_448
"""Shared memory one program may have on sm_90."""


@dataclass(frozen=True)
class Tile:
    """How one launch is cut: elements a program owns, its warps, its loads in flight."""

    rows: int
    columns: int
    warps: int
    stages: int
    group: int = 8
    """Row tiles that are walked before the next column: they share the weights in L2."""
    persistent: bool = False
    """One program a multiprocessor, operands through TMA descriptors."""

    def shared_bytes(self, block_k: int, item_bytes: int) -> int:
        """Bytes of shared memory the pipeline needs."""
        return self.stages * (self.rows + self.columns) * block_k * item_bytes


@dataclass(frozen=True)
class Bucket:
    """The tile for at most `rows_max` rows."""

    rows_max: int
    tile: Tile


ANY_ROWS: Final = 1 << 62
DEFAULT: Final = (
    Bucket(16, Tile(16, 32, warps=4, stages=8)),
    Bucket(64, Tile(64, 64, warps=4, stages=6)),
    Bucket(256, Tile(64, 128, warps=4, stages=4)),
    Bucket(1024, Tile(128, 128, warps=8, stages=4)),
    Bucket(ANY_ROWS, Tile(128, 256, warps=8, stages=3, persistent=True)),
)
"""For weights without an entry of their own; reasoned from shared memory and waves, not yet timed."""
TABLE: Final[dict[tuple[str, int, int], tuple[Bucket, ...]]] = {}
"""(arch, N, K) -> buckets, ascending. Filled from measurements only."""
FP32: Final = Tile(16, 64, warps=4, stages=3)
"""Products of fp32 operands are small ones (gates, betas): one tile for all."""


@dataclass(frozen=True)
class HeadTile:
    """One launch of the product by head, for at most `rows_max` rows."""

    rows_max: int
    rows: int
    columns: int
    warps: int
    stages: int


HEAD_TILES: Final = (
    HeadTile(16, 16, 64, warps=4, stages=3),
    HeadTile(64, 64, 64, warps=4, stages=3),
    HeadTile(ANY_ROWS, 64, 128, warps=4, stages=3),
)
"""Ascending."""


def tile_for(arch: str, rows: int, outputs: int, inputs: int) -> Tile:
    """The pinned tile of a bf16 product [rows, inputs] x [outputs, inputs]."""
    buckets = TABLE.get((arch, outputs, inputs), DEFAULT)
    return next(bucket.tile for bucket in buckets if rows <= bucket.rows_max)


def every_tile() -> tuple[Tile, ...]:
    """All tiles that dispatch may choose, for tests that compare their bits."""
    buckets = [*DEFAULT, *(bucket for entry in TABLE.values() for bucket in entry)]
    return tuple(dict.fromkeys(bucket.tile for bucket in buckets))
