"""Norms, gates and embedding rows in Triton: a row alone is the row of a batch, and both are the definition."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.elementwise import sigmoid, silu
from forkpoint.kernels.embedding import triton as embedding
from forkpoint.kernels.ffn import triton as ffn
from forkpoint.kernels.ffn.activation import Activation
from forkpoint.kernels.ffn.naive import glu
from forkpoint.kernels.norm import naive
from forkpoint.kernels.norm import triton as norm
from tests.support.kernels import at_offset
from tests.support.triton_shim import DEVICE

EPS = 1e-5
WIDTHS = (1, 16, 100, 128, 2304, 7168)
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


def rows(count: int, width: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Random rows of very different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator) * torch.logspace(-3, 3, count)[:, None]
    return x.to(DEVICE, dtype)


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_of_a_row_alone_is_that_of_the_row_in_a_batch(width: int, dtype: torch.dtype) -> None:
    x, gate, weight = rows(5, width, dtype), rows(5, width, dtype, 1), rows(1, width, seed=2)[0]
    together = norm.rms_norm(x, weight, EPS), norm.l2_norm(x), norm.gated_rms_norm(x, gate, weight, EPS)
    order = torch.tensor([3, 0, 4], device=DEVICE)
    moved = (
        norm.rms_norm(x[order], weight, EPS),
        norm.l2_norm(x[order]),
        norm.gated_rms_norm(x[order], gate[order], weight, EPS),
    )
    for whole, part in zip(together, moved, strict=True):
        assert torch.equal(whole[order], part)
    assert torch.equal(norm.rms_norm(x[2:3], weight, EPS), together[0][2:3])


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_are_those_of_the_definition(width: int) -> None:
    x, gate, weight = rows(3, width), rows(3, width, seed=1), rows(1, width, seed=2)[0]
    for ours, definition in (
        (norm.rms_norm(x, weight, EPS), naive.rms_norm(x.double(), weight.double(), EPS)),
        (norm.l2_norm(x), naive.l2_norm(x.double())),
        (
            norm.gated_rms_norm(x, gate, weight, EPS),
            naive.gated_rms_norm(x.double(), gate.double(), weight.double(), EPS),
        ),
    ):
        torch.testing.assert_close(ours.double(), definition, rtol=1e-5, atol=1e-30)


def test_a_norm_reads_no_value_beside_its_row() -> None:
    room = torch.full((4, 160), torch.nan, device=DEVICE)
    room[:, 16:116] = rows(4, 100)
    assert torch.equal(norm.l2_norm(room[:, 16:116]), norm.l2_norm(rows(4, 100)))


def test_a_head_of_a_wider_row_has_the_norm_it_has_alone() -> None:
    o, gate, weight = rows(6, 128), rows(6, 128, seed=1), rows(1, 128, seed=2)[0]
    heads = norm.gated_rms_norm(o.view(2, 3, 128), gate.view(2, 3, 128), weight, EPS)
    assert torch.equal(heads.view(6, 128), norm.gated_rms_norm(o, gate, weight, EPS))


@DTYPES
@pytest.mark.parametrize("width", [1, 100, 128, 2304])
def test_a_norm_does_not_depend_on_where_its_operands_lie(width: int, dtype: torch.dtype) -> None:
    x, gate, weight = rows(19, width, dtype), rows(19, width, dtype, 1), rows(1, width, seed=2)[0]
    whole = norm.gated_rms_norm(x, gate, weight, EPS)
    for items in (1, 3):
        moved = norm.gated_rms_norm(at_offset(x, items), gate, at_offset(weight, items), EPS)
        assert torch.equal(moved, whole)
    wide = torch.full((19, width + 5), torch.nan, device=DEVICE, dtype=dtype)
    wide[:, 2:-3] = x
    assert torch.equal(norm.gated_rms_norm(wide[:, 2:-3], gate, weight, EPS), whole)


@DTYPES
@pytest.mark.parametrize("width", [100, 2304])
def test_a_fused_residual_sum_gives_what_the_two_steps_give(width: int, dtype: torch.dtype) -> None:
    x, delta, weight = rows(5, width, dtype), rows(5, width, dtype, 1), rows(1, width, seed=2)[0]
    total, normed = norm.add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(total, x + delta)
    assert torch.equal(normed, norm.rms_norm(x + delta, weight, EPS))
    for part in (slice(2, 3), slice(1, 5)):
        again = norm.add_rms_norm(x[part], delta[part], weight, EPS)
        assert torch.equal(again[0], total[part])
        assert torch.equal(again[1], normed[part])
    with pytest.raises(ValueError, match="delta has shape"):
        norm.add_rms_norm(x, delta[:2], weight, EPS)


def test_a_norm_of_no_rows_is_empty() -> None:
    assert norm.l2_norm(rows(0, 128)).shape == (0, 128)


def test_norms_say_why_they_refuse() -> None:
    assert norm.why_not(rows(1, 8)) is None
    assert "16384" in str(norm.why_not(torch.empty(1, 20000)))
    assert "contiguous" in str(norm.why_not(torch.empty(4, 4).t()))
    assert "float64" in str(norm.why_not(torch.empty(1, 4, dtype=torch.float64)))
    with pytest.raises(ValueError, match="neither bf16 nor fp32"):
        norm.l2_norm(torch.empty(1, 4, dtype=torch.float16))


@DTYPES
@pytest.mark.parametrize("width", [1, 448, 1025])
def test_swiglu_is_the_definition_and_independent_of_the_batch(width: int, dtype: torch.dtype) -> None:
    both = rows(3, 2 * width, dtype)
    gate, up = both[:, :width], both[:, width:]
    ours = ffn.glu(gate, up, dtype=torch.float32)
    definition = silu(gate.double()) * up.double()
    torch.testing.assert_close(ours.double(), definition, rtol=1e-5, atol=1e-30)
    assert torch.equal(ffn.glu(gate[1:2], up[1:2], dtype=torch.float32), ours[1:2])
    assert torch.equal(ffn.glu(gate, up), ours.to(dtype))


def test_situ_is_the_definition_for_small_and_for_large_arguments_and_independent_of_the_batch() -> None:
    """Near 0, where a tangent from exponentials loses its digits, at the border of the series, and where it is 1."""
    scales = torch.tensor([1e-30, 1e-6, 1e-3, 1.0, 6.3, 100.0, 1e4], device=DEVICE)
    gate, up = (
        rows(7, 100, seed=seed).sign() * scales[:, None] * (1 + rows(7, 100, seed=5).abs() / 1e3) for seed in (1, 2)
    )
    for activation in (Activation("situ", 4.0, 25.0), Activation("situ", 1.5, None)):
        ours = ffn.glu(gate, up, activation)
        definition = glu(gate.double(), up.double(), activation)
        torch.testing.assert_close(ours.double(), definition, rtol=1e-6, atol=1e-36)
        assert torch.equal(ffn.glu(gate[2:3], up[2:3], activation), ours[2:3])


@DTYPES
def test_a_sigmoid_gate_is_the_definition(dtype: torch.dtype) -> None:
    both = rows(3, 2 * 448, dtype)
    x, gate = both[:, :448], both[:, 448:]
    ours = ffn.sigmoid_gate(x, gate, torch.float32)
    torch.testing.assert_close(ours.double(), x.double() * sigmoid(gate.double()), rtol=1e-5, atol=1e-30)
    assert torch.equal(ffn.sigmoid_gate(x[2:], gate[2:]), ours[2:].to(dtype))


@DTYPES
@pytest.mark.parametrize("width", [1, 256, 2304])
def test_embedding_rows_are_those_of_the_table(width: int, dtype: torch.dtype) -> None:
    table = rows(9, width, dtype)
    for ids in (torch.tensor([8, 0, 3, 3], device=DEVICE), torch.tensor([5], device=DEVICE, dtype=torch.int32)):
        assert torch.equal(embedding.gather(ids, table), table[ids.long()])
        assert torch.equal(embedding.gather(ids, table, torch.float32), table[ids.long()].float())
    assert embedding.gather(torch.empty(0, dtype=torch.int64, device=DEVICE), table).shape == (0, width)


def test_embedding_rows_say_why_they_refuse() -> None:
    ids, table = torch.zeros(2, dtype=torch.int64), torch.empty(3, 4)
    assert embedding.why_not(ids, table) is None
    assert "int32 or int64" in str(embedding.why_not(ids.float(), table))
    with pytest.raises(ValueError, match="contiguous rows"):
        embedding.gather(ids, torch.empty(4, 3).t())


def test_swiglu_says_why_it_refuses() -> None:
    assert "one [R, F]" in str(ffn.why_not(torch.empty(2, 3), torch.empty(3, 2)))
