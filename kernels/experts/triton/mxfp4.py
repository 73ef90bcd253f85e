"""MXFP4 elements to bf16 on the device, exact: every element times every scale is a bf16 number, or beyond bf16."""

import triton
import triton.language as tl

from forkpoint.kernels.experts import format

GROUP = tl.constexpr(format.GROUP)
UNBIAS = tl.constexpr(2.0**126)
"""An element's magnitude at the top of bf16's mantissa and the foot of its exponent is its value times 2^-126, 0.5
among them: it becomes bf16's subnormal 2^-127."""
MAGNITUDES, SIGNS = tl.constexpr(0x01C001C0), tl.constexpr(0x80008000)
"""Of two bf16 numbers in 32 bits, the lower element in the lower half."""
TO_MAGNITUDES, TO_SIGNS = tl.constexpr((1 << 6) + (1 << 18)), tl.constexpr((1 << 12) + (1 << 24))
"""A byte times these lies twice in 32 bits, without overlap: once with its low, once with its high half in place."""


@triton.jit
def scale_of(byte):
    """Scale bytes as bf16: 2^(byte - 127).

    What the exponent's bits alone do not say: byte 0 is the subnormal 2^-127, and byte 255 is NaN and not inf. Both
    have the highest bit of the mantissa.
    """
    bits = byte.to(tl.uint32)
    bits = (bits << 7) | tl.where(((bits + 1) & 255) < 2, 0x40, 0).to(tl.uint32)
    return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def decode(values, scales, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Elements bf16 [ROWS, COLUMNS] of values [ROWS, COLUMNS / 2] under scales [ROWS, COLUMNS / 32], uint8.

    A byte is the pair of elements that one register of an MMA's operand holds. Two products, each exact or beyond the
    range: one with the scale alone would need scales up to 2^253.
    """
    byte = values.to(tl.uint32)
    pair = ((byte * TO_MAGNITUDES) & MAGNITUDES) | ((byte * TO_SIGNS) & SIGNS)
    elements = tl.join(pair.to(tl.uint16), (pair >> 16).to(tl.uint16)).to(tl.bfloat16, bitcast=True) * UNBIAS
    elements = tl.reshape(elements, (ROWS, COLUMNS // GROUP, GROUP)) * scale_of(scales)[:, :, None]
    return tl.reshape(elements, (ROWS, COLUMNS))
