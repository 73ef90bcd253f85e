"""TMA descriptors of hopper.py: latents and queries as rows of 576, in boxes of 64 rows."""

from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

ROWS = 64


def row_blocks(x: Tensor) -> tuple[Any, Any]:
    """Boxes of 128 and of 64 columns over x [..., rows, width], bf16; strides above rows are multiples of theirs.

    Rows between the blocks of a strided x (other layers' pages) count as rows too.
    """
    width = x.shape[-1]
    last = sum((size - 1) * stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    rows = last // width + 1
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    wide, thin = (TensorDescriptor(x, [rows, width], [width, 1], [ROWS, columns], layout) for columns in (128, 64))
    return wide, thin
