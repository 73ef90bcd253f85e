"""Products in pieces: a row's bits are the same alone, among any rows, in any tile, and whoever does a piece."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.matmul import triton as matmul
from forkpoint.kernels.matmul.configs import SHARED_BYTES_MAX
from forkpoint.kernels.pieces.configs import PieceTile, every_piece_tile, piece_tile_for, pieces_for
from forkpoint.kernels.pieces.triton import linear_in_pieces
from tests.support.kernels import at_offset, relative_rmse, same_bytes
from tests.support.triton_shim import DEVICE, INTERPRETED

TILES = (
    PieceTile(16, 32, 4, 2, tma=False),
    PieceTile(16, 64, 4, 2, swapped=True, split=True),
    PieceTile(32, 16, 4, 2, split=True),
    PieceTile(32, 64, 4, 2),
    PieceTile(16, 32, 4, 2, extra=16),
)
BF16, FP32 = torch.bfloat16, torch.float32


def matrix(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)).to(DEVICE, BF16)


def product(x: Tensor, weight: Tensor, pieces: int, tile: PieceTile, dtype: torch.dtype = FP32) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), torch.nan, dtype=dtype, device=DEVICE)
    linear_in_pieces(x, weight, out, pieces, tile)
    return out


@pytest.mark.parametrize("pieces", [2, 3, 4])
def test_every_form_gives_the_same_bits_for_any_rows(pieces: int) -> None:
    x, weight = matrix(35, 328), matrix(56, 328, 1)
    first = product(x, weight, pieces, TILES[0])
    for tile in TILES:
        assert torch.equal(product(x, weight, pieces, tile), first), tile
        for cut in (slice(0, 1), slice(17, 34)):
            assert torch.equal(product(x[cut], weight, pieces, tile), first[cut]), tile
        assert torch.equal(product(x, weight, pieces, tile, BF16), first.to(BF16)), tile
    assert relative_rmse(first, x.double() @ weight.double().T) < 1e-6


def test_an_element_is_the_sum_of_its_pieces_in_ascending_order() -> None:
    x, weight = matrix(5, 320), matrix(16, 320, 1)
    total = torch.zeros(5, 16, device=DEVICE)
    for first, last in ((0, 128), (128, 256), (256, 320)):
        total += matmul.linear(x[:, first:last].contiguous(), weight[:, first:last].contiguous())
    for tile in TILES:
        assert torch.equal(product(x, weight, 3, tile), total)
    assert not torch.equal(matmul.linear(x, weight), total)


def test_a_poisoned_row_stays_in_its_row_and_a_piece_in_its_piece() -> None:
    room = torch.full((9, 400), torch.nan, device=DEVICE, dtype=BF16)
    x, weight = matrix(5, 256), matrix(24, 256, 1)
    room[:5, 8:264] = x
    room[3, 8:264] = torch.nan
    keep = [0, 1, 2, 4]
    for tile in TILES:
        poisoned = product(room[:5, 8:264], weight, 4, tile)
        assert torch.equal(poisoned[keep], product(x, weight, 4, tile)[keep])
        assert poisoned[3].isnan().all()


def test_a_product_of_a_long_sum_takes_pieces_whatever_its_operands_alignment() -> None:
    x, weight = matrix(3, 6144), matrix(32, 6144, 1)
    ours = matmul.linear(x, weight)
    assert torch.equal(ours, product(x, weight, 4, TILES[0]))
    assert torch.equal(matmul.linear(at_offset(x, 1), weight), ours)
    assert torch.equal(matmul.linear(x[1:2], weight, BF16), ours[1:2].to(BF16))


@pytest.mark.skipif(INTERPRETED, reason="the pinned tiles are too large for the interpreter")
@pytest.mark.parametrize(("inputs", "outputs"), [(9216, 2304), (7168, 576), (7168, 1536), (6144, 1000)])
def test_every_number_of_rows_and_every_pinned_tile_gives_the_same_bytes(inputs: int, outputs: int) -> None:
    x, weight = matrix(8300, inputs), matrix(outputs, inputs, 1)
    pieces = pieces_for(inputs, outputs)
    whole = matmul.linear(x, weight, BF16)
    for rows in (1, 16, 17, 33, 64, 65, 128, 200, 256, 512, 1024, 2048):
        assert same_bytes(matmul.linear(x[-rows:], weight, BF16), whole[-rows:]), rows
    for tile in every_piece_tile():
        assert same_bytes(product(x[:300], weight, pieces, tile, BF16), whole[:300]), tile


def test_pieces_follow_from_the_weights_shape() -> None:
    assert [pieces_for(*shape) for shape in ((9216, 2304), (7168, 576), (7168, 1536))] == [3, 4, 4]
    for shape in ((2304, 576), (4096, 2304), (12288, 7168), (7168, 12288), (9216, 2305), (6143, 64), (9216, 0)):
        assert pieces_for(*shape) == 1


def test_every_size_has_a_pinned_tile_that_fits() -> None:
    tiles = set(every_piece_tile())
    for outputs in (16, 576, 1536, 2304):
        for rows in (1, 16, 17, 32, 33, 64, 65, 256, 1024, 8192, 1 << 20):
            tile = piece_tile_for(rows, outputs, pieces_for(7168, outputs))
            assert tile in tiles
            assert tile.stages * (tile.rows + tile.columns + tile.extra) * 128 <= SHARED_BYTES_MAX
            assert tile.split or rows > 64
