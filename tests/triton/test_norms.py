"""Norms and SwiGLU in Triton: a row alone is the row of a batch, and both are the definition."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.elementwise import silu
from forkpoint.kernels.ffn import triton as ffn
from forkpoint.kernels.norm import naive
from forkpoint.kernels.norm import triton as norm
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
    ours = ffn.swiglu(gate, up, torch.float32)
    definition = silu(gate.double()) * up.double()
    torch.testing.assert_close(ours.double(), definition, rtol=1e-5, atol=1e-30)
    assert torch.equal(ffn.swiglu(gate[1:2], up[1:2], torch.float32), ours[1:2])
    assert torch.equal(ffn.swiglu(gate, up), ours.to(dtype))


def test_swiglu_says_why_it_refuses() -> None:
    assert "one [R, F]" in str(ffn.why_not(torch.empty(2, 3), torch.empty(3, 2)))
