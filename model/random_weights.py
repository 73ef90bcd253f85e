"""Random weights of realistic scales, for models that nobody trained: each tensor follows from its name and a seed."""

import hashlib
import math
from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.experts.format import GROUP
from forkpoint.model.inventory import PACKED_SUFFIX, SCALE_SUFFIX

PIECE_VALUES: Final = 1 << 15
"""Values made at a time: they stay in a core's cache, and torch cuts nothing so small among threads, so that several
tensors may be made at once. Part of what a seed means."""
ELEMENT_LOG2: Final = math.log2(137 / 16) / 2
"""log2 of the root mean square of evenly drawn MXFP4 elements."""
SCALE_BIAS: Final = 127
"""A scale byte s means 2^(s - 127)."""


def random_tensor(name: str, shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor of a published `name` in its canonical shape, in `dtype`, which a quantised one has not (uint8).

    Values are bf16's whatever the dtype: projections N(0, 1 / inputs), embeddings N(0, 1), norms near 1, A in 1..16,
    steps of the decay in 1e-3..1e-1. MXFP4: any elements, under scales that give about the same variance. Equal bits
    for equal arguments, whatever other tensors are made.
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    if name.endswith(PACKED_SUFFIX):
        words = torch.empty(-(-math.prod(shape) // 8), dtype=torch.int64)
        words.random_(torch.iinfo(torch.int64).min, None, generator=generator)
        return words.view(torch.uint8)[: math.prod(shape)].view(shape)
    if name.endswith(SCALE_SUFFIX):
        middle = SCALE_BIAS + round(-math.log2(shape[1] * GROUP) / 2 - ELEMENT_LOG2)
        return torch.randint(middle - 2, middle + 2, shape, generator=generator, dtype=torch.uint8)
    flat = torch.empty(math.prod(shape), dtype=dtype)
    for piece in torch.split(flat, PIECE_VALUES):
        piece.copy_(_values(name, shape, piece.numel(), generator).to(torch.bfloat16))
    return flat.view(shape)


def _values(name: str, shape: tuple[int, ...], count: int, generator: torch.Generator) -> Tensor:
    """The next `count` values [count] fp32 of a tensor."""
    if name.endswith(".A_log"):
        return torch.empty(count).uniform_(1.0, 16.0, generator=generator).log()
    if name.endswith(".dt_bias"):
        # fla's initialisation: the inverse softplus of a step between 1e-3 and 1e-1.
        step = torch.empty(count).uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
        return step + torch.log(-torch.expm1(-step))
    values = torch.randn(count, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * values
    if name.endswith("_conv1d.weight"):
        return 0.5 * values
    if name.endswith(".e_score_correction_bias"):
        return 0.1 * values
    return values if name.endswith("embed_tokens.weight") else values * shape[1] ** -0.5
