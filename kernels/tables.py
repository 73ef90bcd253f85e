"""Tables that are planned on the host: all of a step's go to the device in one copy."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

ALIGNMENT: Final = 32
"""int32 values: parts of the one copy begin at multiples of 128 bytes, so that kernels see one alignment."""


def one_copy(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """int32 or int64 tensors on the host to views of one tensor on the device."""
    return _views(_joined(parts).to(device), parts)


class FixedTables:
    """Tables that stay at their place on the device, and are filled anew by one copy: what a CUDA graph reads."""

    def __init__(self, parts: Sequence[Tensor], device: torch.device) -> None:
        self._whole = _joined(parts).to(device)
        self.parts = _views(self._whole, parts)

    def fill(self, parts: Sequence[Tensor]) -> None:
        """Put `parts`, of the shapes and dtypes that the first ones had, in their place."""
        self._whole.copy_(_joined(parts))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    places, end = _places(parts)
    joined = torch.zeros(end, dtype=torch.int32)
    for part, place in zip(parts, places, strict=True):
        flat = part.flatten().view(torch.int32)
        joined[place : place + flat.numel()] = flat
    return joined


def _views(joined: Tensor, parts: Sequence[Tensor]) -> list[Tensor]:
    return [
        joined[place : place + _words(part)].view(part.dtype).view(part.shape)
        for part, place in zip(parts, _places(parts)[0], strict=True)
    ]


def _places(parts: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where each part begins, and the end, in int32 values."""
    places, end = list[int](), 0
    for part in parts:
        places.append(end)
        end += -(-_words(part) // ALIGNMENT) * ALIGNMENT
    return places, end


def _words(part: Tensor) -> int:
    if part.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"a table of {part.dtype}: int32 or int64")
    return part.numel() * part.element_size() // 4
