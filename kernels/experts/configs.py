"""Pinned tiles of the grouped products: no timing at run time picks one.

As in matmul/configs.py, BLOCK_K and the ascending chain over K decide the bits of an element. A `Tile` holds what does
not: which rows a program owns, and which operand stands on the M side. So it may follow the number of rows.
"""

from dataclasses import dataclass
from typing import Final

from forkpoint.kernels.matmul.configs import ANY_ROWS

BLOCK_K: Final = 64
"""Inner step of bf16 weights: 128 bytes of a row."""
BLOCK_K_PACKED: Final = 128
"""Inner step of MXFP4 weights: 64 bytes of a row, and four scales."""


@dataclass(frozen=True)
class ExpertTile:
    """How one grouped launch is cut. `columns` are outputs, of gate and of up that many each."""

    rows: int
    columns: int
    warps: int
    stages: int
    swapped: bool = False
    """Weights on the M side of the MMA: 64 outputs fill a wgmma where the rows would not; and decoded weights, which
    are in registers, may stand there only."""


@dataclass(frozen=True)
class ExpertTiles:
    """Of both products, for at most `rows_max` rows an expert on average."""

    rows_max: int
    gate_up: ExpertTile
    down: ExpertTile

    def __post_init__(self) -> None:
        assert self.gate_up.rows == self.down.rows, "both products read one map of tiles"


DENSE: Final = (
    ExpertTiles(16, ExpertTile(16, 64, 4, 6, swapped=True), ExpertTile(16, 64, 4, 6, swapped=True)),
    ExpertTiles(32, ExpertTile(32, 64, 4, 5, swapped=True), ExpertTile(32, 64, 4, 6, swapped=True)),
    ExpertTiles(64, ExpertTile(64, 64, 4, 4), ExpertTile(64, 128, 4, 4)),
    ExpertTiles(ANY_ROWS, ExpertTile(128, 128, 8, 4), ExpertTile(128, 256, 8, 4)),
)
"""Ascending."""
PACKED: Final = (
    ExpertTiles(16, ExpertTile(16, 64, 4, 5, swapped=True), ExpertTile(16, 64, 4, 6, swapped=True)),
    ExpertTiles(32, ExpertTile(32, 64, 4, 5, swapped=True), ExpertTile(32, 64, 4, 6, swapped=True)),
    ExpertTiles(64, ExpertTile(64, 64, 4, 4, swapped=True), ExpertTile(64, 64, 4, 4, swapped=True)),
    ExpertTiles(ANY_ROWS, ExpertTile(128, 128, 8, 3, swapped=True), ExpertTile(128, 128, 8, 3, swapped=True)),
)
"""Likewise, of MXFP4 weights."""


def tiles_for(assigned: int, experts: int, packed: bool) -> ExpertTiles:
    """The pinned tiles of `assigned` rows (R times k) that go to `experts` experts: a function of these alone."""
    mean = assigned / max(1, min(assigned, experts))
    return next(tiles for tiles in (PACKED if packed else DENSE) if mean <= tiles.rows_max)


def tiles_max(assigned: int, experts: int, rows: int) -> int:
    """Most tiles of `rows` rows that any choice of experts needs: one for each expert that has a row, and the rest."""
    used = min(assigned, experts)
    return used + (assigned - used) // rows
