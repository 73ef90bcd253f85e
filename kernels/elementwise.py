"""Elementwise functions from operations whose bits depend on nothing but their operand.

torch's own `sigmoid`, `silu`, `softplus` and `exp2` give other bits at the end of a vector, or for other strides,
than in its middle. `exp`, `log1p`, `tanh`, `rsqrt` and division do not (tests/kernels/test_allow_list.py), so
everything here is made of those. A Triton twin of a row kernel keeps the same order of operations.
"""

import math
from typing import Final

import torch
from torch import Tensor

GATE_BITS: Final = 22
"""Log2 gates are int32 in units of 2^-GATE_BITS: sums are exact in any order, and 16 gates of -24 still fit."""
GATE_ONE: Final = 1 << GATE_BITS
LN2: Final = math.log(2.0)
LOG2_E: Final = math.log2(math.e)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), any shape, fp32 or fp64. exp overflows to inf below about -88, which gives 0 as it should."""
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x) as one division, any shape, fp32 or fp64."""
    return x / torch.neg(x).exp_().add_(1.0)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) without cancellation, any shape: max(x, 0) + log1p(exp(-|x|)).

    Published code switches to the identity above 20, where both agree to fp32's last bit.
    """
    return x.abs().neg_().exp_().log1p_().add_(x.clamp(min=0.0))


def tanh(x: Tensor) -> Tensor:
    """Hyperbolic tangent, any shape."""
    return torch.tanh(x)


def power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, built from the bits: int32 in, 0 below 2^-126, inf above 2^127."""
    return ((exponent.clamp(-127, 128) + 127) << 23).view(torch.float32)


def gate_parts(n: Tensor) -> tuple[Tensor, Tensor]:
    """Splits int32 n (units of 2^-22) into an fp32 mantissa 2^fraction in [1, 2] and the int32 floor of n."""
    fraction = (n & (GATE_ONE - 1)).to(torch.float32)
    return fraction.mul_(LN2 / GATE_ONE).exp_(), n >> GATE_BITS


def pow2_fixed(n: Tensor, shift: int | Tensor = 0) -> Tensor:
    """2^(n * 2^-22 + shift) as fp32 for int32 n; `shift` is an int or an int32 tensor that broadcasts.

    The fraction goes through exp, the integer into the exponent's bits, so a change of `shift` moves no mantissa bit.
    Results below 2^-126 are 0, above 2^128 inf. exp(x * ln 2) of the whole number would lose 7 bits for large |x|.
    """
    mantissa, exponent = gate_parts(n)
    return mantissa * power_of_two(exponent + shift)
