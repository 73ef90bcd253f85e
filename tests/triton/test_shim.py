"""The mended interpreter: bf16 as torch has it, and products whose rows know nothing of each other."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from tests.support.triton_shim import INTERPRETED, narrow, ordered_product, widen

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here, not interpreted")


@triton.jit
def dot_kernel(a, b, out, N: tl.constexpr):
    """out = a b, and in bf16 elementwise a + b below it."""
    place = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(a + place), tl.load(b + place)
    tl.store(out + place, tl.dot(x, y))
    tl.store(out + N * N + place, (x + y).to(tl.float32))


def test_rounding_to_bf16_is_torchs_for_every_kind_of_number() -> None:
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=generator).to(torch.int32)
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00008000, 0x7F800000, 1 << 31]) - (1 << 32)
    x = torch.cat([bits, ties.to(torch.int32), (ties + (1 << 31)).to(torch.int32)]).view(torch.float32)
    ours = torch.from_numpy(narrow(x.numpy()).view(np.int16)).view(torch.bfloat16)
    both_nan = ours.isnan() & x.isnan()
    assert torch.equal(ours[~both_nan].view(torch.int16), x.bfloat16()[~both_nan].view(torch.int16))
    assert torch.equal(ours.isnan(), x.isnan())
    assert np.array_equal(widen(narrow(x.numpy())), ours.float().numpy(), equal_nan=True)


def test_bf16_products_and_sums_are_those_of_the_numbers() -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(16, 16, generator=generator).bfloat16() for _ in range(2))
    out = torch.empty(32, 16)
    dot_kernel[(1,)](a, b, out, N=16)
    torch.testing.assert_close(out[:16].double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    assert torch.equal(out[16:], (a + b).float())


def test_an_element_of_a_product_is_the_same_in_any_tile() -> None:
    random = np.random.default_rng(2)
    a, b = (random.standard_normal((64, 64), dtype=np.float32) for _ in range(2))
    whole = ordered_product(a, b, np.zeros((64, 64), dtype=np.float32))
    part = ordered_product(a[8:24], b[:, 32:48], np.zeros((16, 16), dtype=np.float32))
    assert np.array_equal(part, whole[8:24, 32:48])
