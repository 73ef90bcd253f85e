"""The product by head: a row's bits are the same alone, among any rows, in any tile: the plain product's."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.matmul import triton as matmul
from forkpoint.kernels.matmul.configs import HEAD_TILES, HeadTile
from forkpoint.kernels.per_head.triton import per_head_linear, why_not
from tests.support.kernels import relative_rmse
from tests.support.triton_shim import DEVICE

BF16, FP32 = torch.bfloat16, torch.float32
TILES = (HeadTile(16, 16, 16, 4, 2), *HEAD_TILES)


def operands(rows: int, heads: int, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, heads, inputs, generator=generator).to(DEVICE, BF16)
    weight = torch.randn(heads, inputs, outputs, generator=torch.Generator().manual_seed(1)).to(DEVICE, BF16)
    return x, weight


def test_a_row_has_the_same_bits_alone_among_others_and_in_any_tile() -> None:
    x, weight = operands(19, 2, 128, 40)
    whole = per_head_linear(x, weight, FP32)
    for tile in TILES:
        assert torch.equal(per_head_linear(x, weight, FP32, tile=tile), whole)
    for cut in (slice(0, 1), slice(7, 18)):
        assert torch.equal(per_head_linear(x[cut], weight, FP32), whole[cut])
    assert torch.equal(per_head_linear(x, weight), whole.to(BF16))


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 40), (64, 16), (70, 33), (1, 1)])
def test_a_head_has_the_bits_of_the_plain_product(inputs: int, outputs: int) -> None:
    x, weight = operands(5, 3, inputs, outputs)
    ours = per_head_linear(x, weight, FP32)
    for head in range(3):
        plain = matmul.linear(x[:, head].contiguous(), weight[head].t().contiguous())
        assert torch.equal(ours[:, head], plain)
    exact = torch.einsum("rha,hab->rhb", x.double(), weight.double())
    assert relative_rmse(ours, exact) < 1e-6


def test_strided_operands_and_a_part_of_a_wider_result_give_the_same_bits() -> None:
    x, weight = operands(6, 2, 64, 32)
    whole = per_head_linear(x, weight)
    room = torch.full((6, 2, 100), torch.nan, device=DEVICE, dtype=BF16)
    room[..., 10:74] = x
    wide = torch.zeros(6, 2, 50, device=DEVICE, dtype=BF16)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    assert per_head_linear(room[..., 10:74], turned, out=wide[..., :32]).data_ptr() == wide.data_ptr()
    assert torch.equal(wide[..., :32], whole)
    assert not wide[..., 32:].any()


def test_a_product_of_no_rows_is_empty_and_refusals_have_reasons() -> None:
    x, weight = operands(2, 2, 64, 32)
    assert per_head_linear(x[:0], weight).shape == (0, 2, 32)
    assert why_not(x, weight) is None
    assert "[H, A, B]" in str(why_not(x, weight[:1]))
    assert "bf16" in str(why_not(x.float(), weight.float()))
    assert "contiguous" in str(why_not(x.transpose(1, 2).contiguous().transpose(1, 2), weight))
    with pytest.raises(ValueError, match="contiguous values"):
        per_head_linear(x, weight, out=torch.empty(2, 2, 31, device=DEVICE, dtype=BF16))
