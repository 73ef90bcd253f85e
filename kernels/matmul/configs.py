"""Pinned tiles of the row-invariant product: no timing at run time picks one, so two machines pick the same.

BLOCK_K, the ascending chain over K and the product of 16 values inside an MMA decide the bits of a row, and are the
same in every form. What a `Tile` holds decides only which program owns an element and which operand stands on the M
side, so it may follow the number of rows: all forms gave equal bytes on an H200 (`python -m benchmarks.kernels` and
tests/triton compare them again). The rule below was fitted to times there, of every product of Kimi Linear and K3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

BLOCK_K: Final = 64
"""Inner step of bf16 products: 128 bytes, one swizzled line of shared memory."""
BLOCK_K_FP32: Final = 32
"""Inner step of fp32 products."""
SHARED_BYTES_MAX: Final = 232_448
"""Shared memory one program may have on sm_90."""
MULTIPROCESSORS: Final = 132
"""Of an H200. A constant of the rule, so that it gives the same tile anywhere."""


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
    """A program walks over tiles, operands and result through TMA descriptors."""
    tma: bool = False
    """One tile a program, operands through TMA descriptors."""
    swapped: bool = False
    """Weights on the M side of the MMA: 64 outputs fill a wgmma where the rows would not."""
    unroll: int = 1
    """Inner steps between two barriers, for programs that only wait for memory."""
    occupancy: int = 1
    """Programs of the persistent form on one multiprocessor."""
    tail: int = 1
    """Column parts that each tile after the last full wave of the persistent form is cut into."""

    def shared_bytes(self, block_k: int, item_bytes: int) -> int:
        """Bytes of shared memory the pipeline needs."""
        return self.stages * self.unroll * (self.rows + self.columns) * block_k * item_bytes


@dataclass(frozen=True)
class HeadTile:
    """One launch of the product by head, for at most `rows_max` rows."""

    rows_max: int
    rows: int
    columns: int
    warps: int
    stages: int


ANY_ROWS: Final = 1 << 62
HEAD_TILES: Final = (
    HeadTile(16, 16, 64, warps=4, stages=3),
    HeadTile(64, 64, 64, warps=4, stages=3),
    HeadTile(ANY_ROWS, 64, 128, warps=4, stages=3),
)
"""Ascending."""
FP32: Final = Tile(16, 64, warps=4, stages=3)
"""Products of fp32 operands are small ones (gates, betas): one tile for all."""

_NARROW: Final = {
    16: (
        (132, Tile(16, 64, 4, 6, swapped=True, unroll=2)),
        (264, Tile(16, 64, 4, 4, swapped=True, unroll=2)),
        (396, Tile(16, 64, 4, 6, swapped=True)),
        (ANY_ROWS, Tile(16, 64, 4, 4, swapped=True, unroll=2)),
    ),
    32: (
        (66, Tile(16, 64, 4, 8, swapped=True)),
        (132, Tile(32, 64, 4, 5, swapped=True, unroll=2)),
        (ANY_ROWS, Tile(32, 64, 4, 6, tma=True, swapped=True)),
    ),
    64: (
        (66, Tile(64, 32, 4, 5, unroll=2)),
        (132, Tile(64, 64, 4, 8, tma=True)),
        (264, Tile(64, 128, 8, 6, tma=True, swapped=True)),
        (396, Tile(64, 64, 4, 4, tma=True)),
        (ANY_ROWS, Tile(64, 128, 4, 5, tma=True, swapped=True)),
    ),
}
"""Most rows -> (most columns of 64 outputs, tile), ascending. Weights from memory are the whole cost: what counts is
that all multiprocessors load, and how much each has in flight, so the depth follows how many programs share one."""
_WIDE: Final = (
    (11.0, 1, Tile(128, 256, 8, 4, persistent=True)),
    (5.9, 2, Tile(128, 128, 4, 3, persistent=True, occupancy=2)),
    (5.9, 1, Tile(128, 128, 8, 5, tma=True)),
    (3.7, 1, Tile(128, 64, 4, 6, tma=True, swapped=True)),
    (1.95, 2, Tile(64, 64, 4, 6, tma=True)),
)
"""(Nanoseconds of an inner value of K in one wave, programs a multiprocessor, tile): more than 64 rows."""
_TAILS: Final = ((5.9, 2), (3.7, 4))
"""(Nanoseconds likewise, parts) of a last wave of parts of the first of `_WIDE`."""


def _cut(tile: Tile, rows: int, outputs: int) -> int:
    return -(-rows // tile.rows) * -(-outputs // tile.columns)


def _wide(rows: int, outputs: int) -> Tile:
    """The tile with the lowest sum of waves. A tie goes to the first."""
    choices: list[tuple[float, Tile]] = []
    for cost, programs, tile in _WIDE:
        tiles = _cut(tile, rows, outputs)
        waves = programs * -(-tiles // (programs * MULTIPROCESSORS))
        choices.append((cost * waves, tile))
    cost, _, tile = _WIDE[0]
    full, rest = divmod(_cut(tile, rows, outputs), MULTIPROCESSORS)
    choices += [
        (cost * full + extra, replace(tile, tail=parts))
        for extra, parts in _TAILS
        if 0 < rest * parts <= MULTIPROCESSORS and full
    ]
    return min(choices, key=lambda choice: choice[0])[1]


def tile_for(rows: int, outputs: int) -> Tile:
    """The pinned tile of a bf16 product [rows, K] x [outputs, K]: a function of these numbers alone."""
    for rows_max, entries in _NARROW.items():
        if rows <= rows_max:
            return next(tile for columns_max, tile in entries if -(-outputs // 64) <= columns_max)
    return _wide(rows, outputs)


def without_tma(tile: Tile) -> Tile:
    """The tile for operands that descriptors cannot describe."""
    if not (tile.tma or tile.persistent):
        return tile
    if tile.rows <= 32:
        return Tile(16, 64, 4, 6, swapped=True)
    return Tile(64, 64, 4, 6)


def every_tile() -> tuple[Tile, ...]:
    """All tiles that dispatch may choose, for tests that compare their bits."""

    def tiles() -> Iterator[Tile]:
        for entries in _NARROW.values():
            yield from (tile for _, tile in entries)
        yield from (tile for _, _, tile in _WIDE)
        yield from (replace(_WIDE[0][2], tail=parts) for _, parts in _TAILS)

    found = list(dict.fromkeys(tiles()))
    return tuple(dict.fromkeys([*found, *map(without_tma, found)]))
