"""Tables that are planned on the host: all of a step's go to the device in one copy."""

from typing import Final

import torch
from torch import Tensor

ALIGNMENT: Final = 32
"""int32 values: parts of the one copy begin at multiples of 128 bytes, so that kernels see one alignment."""


def one_copy(parts: list[Tensor], device: torch.device) -> list[Tensor]:
    """int32 tensors on the host to views of one tensor on the device."""
    places, end = [], 0
    for part in parts:
        places.append(end)
        end += -(-part.numel() // ALIGNMENT) * ALIGNMENT
    joined = torch.zeros(end, dtype=torch.int32)
    for part, place in zip(parts, places, strict=True):
        joined[place : place + part.numel()] = part.flatten()
    there = joined.to(device)
    return [there[place : place + part.numel()].view(part.shape) for part, place in zip(parts, places, strict=True)]
