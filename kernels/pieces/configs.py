"""Into how many pieces the sum of a product is cut, and the pinned tiles of such products.

The number of pieces is part of an element's bits, so it follows from the weight's shape alone. Which program owns an
element, and whether it goes through all pieces or through one, is not; so that may follow the number of rows. Fitted to
times on an H200, of 9216 x 2304, 7168 x 576 and 7168 x 1536 (K x N).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from forkpoint.kernels.matmul.configs import MULTIPROCESSORS

INPUTS_MIN: Final = 6144
"""Shorter sums are one chain: too little to gain."""
OUTPUTS_MAX: Final = 2304
"""More outputs are one chain: they fill the machine by themselves."""
PIECES_MAX: Final = 4
PROGRAMS: Final = 108
"""Tiles of 64 outputs times pieces, at most."""
SPLIT_PROGRAMS: Final = 4 * MULTIPROCESSORS
"""Most programs of one piece each: two waves of two a multiprocessor. Beyond, partial sums cost more than they gain."""


def pieces_for(inputs: int, outputs: int) -> int:
    """Pieces of the sum of a bf16 product with a weight [outputs, inputs]."""
    if inputs < INPUTS_MIN or not 0 < outputs <= OUTPUTS_MAX:
        return 1
    return min(PIECES_MAX, PROGRAMS // -(-outputs // 64))


@dataclass(frozen=True)
class PieceTile:
    """How one launch is cut."""

    rows: int
    columns: int
    warps: int
    stages: int
    extra: int = 0
    """Columns beside those, for a width that is no power of two."""
    swapped: bool = False
    """Weights on the M side of the MMA."""
    split: bool = False
    """A program does one piece of its tile; a second kernel adds the pieces. Else it goes through all of them."""
    tma: bool = True

    def programs(self, rows: int, outputs: int) -> int:
        """Tiles of a product."""
        return -(-rows // self.rows) * -(-outputs // (self.columns + self.extra))


WITHOUT_TMA: Final = PieceTile(64, 64, 4, 4, tma=False)
"""For operands that descriptors cannot describe."""
_SPLIT: Final = (
    (16, PieceTile(16, 64, 4, 8, swapped=True, split=True)),
    (32, PieceTile(32, 64, 4, 8, swapped=True, split=True)),
    (1 << 62, PieceTile(64, 64, 4, 6, swapped=True, split=True)),
)
"""Most rows -> tile, ascending."""
_WHOLE: Final = (
    (9.8, 1, PieceTile(128, 128, 8, 4, extra=64)),
    (8.9, 1, PieceTile(128, 128, 8, 5, extra=16)),
    (6.6, 1, PieceTile(128, 128, 8, 4)),
    (4.7, 1, PieceTile(128, 64, 4, 5)),
    (2.5, 2, PieceTile(64, 64, 4, 6)),
)
"""(Nanoseconds of an inner value of K in one wave, programs a multiprocessor, tile)."""


def piece_tile_for(rows: int, outputs: int, pieces: int) -> PieceTile:
    """The pinned tile of a product of `rows` rows: a function of these numbers alone."""
    split = next(tile for rows_max, tile in _SPLIT if rows <= rows_max)
    if split.programs(rows, outputs) * pieces <= SPLIT_PROGRAMS:
        return split

    def cost(choice: tuple[float, int, PieceTile]) -> float:
        nanoseconds, programs, tile = choice
        return nanoseconds * programs * -(-tile.programs(rows, outputs) // (programs * MULTIPROCESSORS))

    return min(_WHOLE, key=cost)[2]


def every_piece_tile() -> Iterator[PieceTile]:
    """All tiles that dispatch may choose."""
    yield from (tile for _, tile in _SPLIT)
    yield from (tile for _, _, tile in _WHOLE)
    yield WITHOUT_TMA
