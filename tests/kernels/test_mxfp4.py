"""MXFP4: every byte under scales of every kind, against the format's definition."""

import math

import pytest
import torch

from forkpoint.kernels.experts.mxfp4 import scale_values, unpack

SCALES = [0, 1, 22, 127, 252, 254]


def element(code: int) -> float:
    """Sign, two bits of exponent (bias 1), one of mantissa; exponent 0 is subnormal."""
    sign, exponent, mantissa = (-1.0) ** (code >> 3), code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


@pytest.mark.parametrize("scale", SCALES)
def test_every_byte_holds_its_two_elements_the_low_half_first(scale: int) -> None:
    values = torch.arange(256, dtype=torch.uint8).view(4, 64)
    got = unpack(values, torch.full((4, 4), scale, dtype=torch.uint8)).flatten().tolist()
    for byte in range(256):
        for place, code in enumerate((byte & 15, byte >> 4)):
            exact = math.ldexp(element(code), scale - 127)
            largest = float(torch.finfo(torch.float32).max)
            expected = exact if abs(exact) <= largest else math.copysign(math.inf, exact)
            assert got[2 * byte + place] == expected
            assert math.copysign(1.0, got[2 * byte + place]) == math.copysign(1.0, expected)


def test_a_scale_that_is_no_number_makes_its_whole_group_none() -> None:
    values = torch.zeros(1, 32, dtype=torch.uint8)
    got = unpack(values, torch.tensor([[127, 255]], dtype=torch.uint8))
    assert got.isnan().tolist() == [[False] * 32 + [True] * 32]


def test_scales_are_powers_of_two_and_255_is_no_number() -> None:
    got = scale_values(torch.arange(256, dtype=torch.uint8)).tolist()
    assert got[:255] == [math.ldexp(1.0, scale - 127) for scale in range(255)]
    assert math.isnan(got[255])


def test_a_scale_belongs_to_32_elements_of_its_own_row() -> None:
    ones = torch.full((2, 3, 32), 0x22, dtype=torch.uint8)
    scales = torch.tensor(
        [[[127, 128], [129, 130], [131, 132]], [[126, 125], [124, 123], [122, 121]]], dtype=torch.uint8
    )
    got = unpack(ones, scales)
    assert got.shape == (2, 3, 64)
    expected = torch.pow(2.0, scales.float() - 127).repeat_interleave(32, dim=2)
    assert torch.equal(got, expected)
