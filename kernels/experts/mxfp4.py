"""MXFP4 in plain torch: E2M1 elements with one power-of-two scale for each 32 of a row.

Source: the OCP microscaling formats specification 1.0; the layout of compressed-tensors' `mxfp4-pack-quantized`.
"""

from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.experts.format import GROUP

MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of the low three bits of an element; the fourth is the sign."""
_SUBNORMAL: Final = 0x00400000
"""Bits of 2^-127, the one scale that is no normal fp32 number."""
_NAN_SCALE: Final = 255


def scale_values(scales: Tensor) -> Tensor:
    """Scale bytes s [...] uint8 as fp32: 2^(s - 127), NaN for 255."""
    bits = scales.to(torch.int32) << 23
    bits = torch.where(scales == 0, _SUBNORMAL, bits)
    return torch.where(scales == _NAN_SCALE, torch.nan, bits.view(torch.float32))


def unpack(values: Tensor, scales: Tensor) -> Tensor:
    """Elements of values [..., K / 2] uint8 under scales [..., K / 32] uint8: [..., K] fp32, exact."""
    codes = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2).to(torch.int64)
    table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=values.device)
    elements = table[codes]
    grouped = elements.reshape(*scales.shape, GROUP)
    return (grouped * scale_values(scales)[..., None]).reshape(elements.shape)
