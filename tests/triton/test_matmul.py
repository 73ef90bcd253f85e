"""The row-invariant product: a row's bits are the same alone, at any place, among any rows, in any tile."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.matmul import configs, naive
from forkpoint.kernels.matmul import triton as matmul
from forkpoint.kernels.matmul.configs import Tile
from tests.support.kernels import at_offset, relative_rmse, same_bytes
from tests.support.triton_shim import DEVICE, INTERPRETED

TILES = (
    Tile(16, 16, 4, 2),
    Tile(32, 64, 4, 2, group=2),
    Tile(16, 32, 4, 2, swapped=True, unroll=2),
    Tile(32, 16, 4, 2, tma=True, swapped=True),
    Tile(64, 32, 4, 2, persistent=True),
    Tile(64, 32, 4, 2, persistent=True, tail=2),
)
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])


def matrix(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=generator).to(DEVICE, dtype)


@DTYPES
def test_a_row_has_the_same_bits_alone_and_among_any_rows(dtype: torch.dtype) -> None:
    x, weight = matrix(35, 144, dtype), matrix(40, 144, dtype, 1)
    whole = matmul.linear(x, weight)
    for cut in (slice(0, 1), slice(17, 18), slice(16, 33), slice(34, 35)):
        assert torch.equal(matmul.linear(x[cut], weight), whole[cut])
    order = torch.randperm(35, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    assert torch.equal(matmul.linear(x[order], weight), whole[order])


@pytest.mark.parametrize("rows", [1, 16, 33, 70])
def test_every_form_gives_the_same_bits(rows: int) -> None:
    x, weight = matrix(rows, 136, BF16), matrix(48, 136, BF16, 1)
    first, *others = [matmul.linear(x, weight, tile=tile) for tile in TILES]
    for other in others:
        assert torch.equal(first, other)


@DTYPES
@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 1, 1), (3, 65, 17), (17, 128, 33), (2, 7, 100)])
def test_odd_shapes_give_the_product(rows: int, inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight = matrix(rows, inputs, dtype), matrix(outputs, inputs, dtype, 1)
    ours = matmul.linear(x, weight)
    assert ours.shape == (rows, outputs)
    assert ours.dtype == FP32
    exact = x.double() @ weight.double().T
    assert relative_rmse(ours, exact) < 1e-6
    torch.testing.assert_close(ours.cpu(), naive.linear(x.float().cpu(), weight.float().cpu()), rtol=1e-4, atol=1e-4)


def test_values_beside_a_matrix_are_not_read_as_numbers() -> None:
    room = torch.full((9, 200), torch.nan, device=DEVICE, dtype=BF16)
    x, weight = matrix(5, 72, BF16), matrix(20, 72, BF16, 1)
    room[:5, 8:80] = x
    for tile in TILES:
        assert torch.equal(matmul.linear(room[:5, 8:80], weight, tile=tile), matmul.linear(x, weight, tile=tile))


def test_a_poisoned_row_stays_in_its_row() -> None:
    x, weight = matrix(18, 64, BF16), matrix(16, 64, BF16, 1)
    clean = matmul.linear(x, weight)
    x[4] = torch.nan
    poisoned = matmul.linear(x, weight)
    assert poisoned[4].isnan().all()
    keep = [row for row in range(18) if row != 4]
    assert torch.equal(poisoned[keep], clean[keep])


def test_a_bf16_result_is_the_fp32_result_rounded() -> None:
    x, weight = matrix(5, 64, BF16), matrix(24, 64, BF16, 1)
    assert torch.equal(matmul.linear(x, weight, dtype=BF16), matmul.linear(x, weight).to(BF16))


def test_a_product_without_rows_is_empty() -> None:
    assert matmul.linear(matrix(0, 64, BF16), matrix(24, 64, BF16)).shape == (0, 24)


def test_operands_that_tma_cannot_take_have_a_reason_and_the_same_bits() -> None:
    x, weight = matrix(70, 68, BF16), matrix(24, 68, BF16, 1)
    assert "16 bytes" in str(matmul.why_not_tma(x, weight))
    x, weight = matrix(70, 64, BF16), matrix(24, 64, BF16, 1)
    moved = at_offset(x, 1)
    assert matmul.why_not_tma(x, weight) is None
    assert "16 bytes" in str(matmul.why_not_tma(moved, weight))
    for tile in (tile for tile in TILES if tile.tma or tile.persistent):
        with pytest.raises(ValueError, match="16 bytes"):
            matmul.linear(moved, weight, tile=tile)
    assert torch.equal(matmul.linear(moved, weight), matmul.linear(x, weight))
    odd = matrix(23, 64, BF16, 1)
    assert torch.equal(matmul.linear(x, odd), matmul.linear(x, weight)[:, :23])


@pytest.mark.skipif(INTERPRETED, reason="the pinned tiles are too large for the interpreter")
@pytest.mark.parametrize("inputs", [64, 192, 1536])
def test_every_pinned_tile_gives_the_same_bytes(inputs: int) -> None:
    x, weight = matrix(300, inputs, BF16), matrix(1552, inputs, BF16, 1)
    x[3] = 0.0
    first = matmul.linear(x, weight, BF16, tile=Tile(16, 16, 4, 2))
    for tile in configs.every_tile():
        for rows in (1, 17, 300):
            assert same_bytes(matmul.linear(x[:rows], weight, BF16, tile=tile), first[:rows]), tile


def test_the_product_says_why_it_refuses() -> None:
    x = torch.empty(4, 8)
    assert matmul.why_not(x, torch.empty(3, 8)) is None
    assert "[M, K]" in str(matmul.why_not(x, torch.empty(3, 9)))
    assert "both fp32" in str(matmul.why_not(x, torch.empty(3, 8, dtype=BF16)))
    assert "contiguous" in str(matmul.why_not(torch.empty(8, 4).t(), torch.empty(3, 8)))


def test_every_size_has_a_pinned_tile_that_fits() -> None:
    for outputs in (16, 2304, 7168, 12288, 18432, 49376, 163840):
        for rows in (1, 16, 17, 33, 64, 65, 128, 256, 1024, 2048, 8192, 1 << 20):
            tile = configs.tile_for(rows, outputs)
            assert tile in configs.every_tile()
            assert tile.shared_bytes(configs.BLOCK_K, 2) <= configs.SHARED_BYTES_MAX


def test_a_short_last_wave_is_cut_into_parts() -> None:
    assert configs.tile_for(2048, 2304).tail == 4
    assert configs.tile_for(8192, 2304).tail == 2
    assert configs.tile_for(8192, 4096).tail == 1
