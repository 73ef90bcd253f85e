"""StateTensors: the memory of slots and pages on one device, laid out by StateLayout (see layout.py for the shapes)."""

import math
from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from forkpoint.model.config import CONV_TAPS
from forkpoint.model.layout import StateDtypes, StateLayout

__all__ = ["POISON_INT32", "TORCH_DTYPES", "StateDtypes", "StateLayout", "StateTensors"]

TORCH_DTYPES: Final = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int32": torch.int32,
    "uint8": torch.uint8,
}
POISON_INT32: Final = -(2**31) + 7
"""Poison of the integer gates: NaN has no integer, and a sum with this overflows every bound of a real gate."""


def _poison(tensor: Tensor) -> None:
    tensor.fill_(math.nan if tensor.is_floating_point() else POISON_INT32)


@dataclass(frozen=True, slots=True)
class KdaLayer:
    """Views of one KDA layer's tensors, [slots, ...]."""

    S: Tensor
    opened: dict[str, Tensor]
    """The open tiles' tensors, by their names without `open_`."""
    conv_ring: Tensor
    conv_grid: Tensor


class StateTensors:
    """Slots and pages. KDA tensors are layer-major `[KDA layers, slots, ...]`, pages `[pages, MLA layers, 64, r + dr]`.

    Not thread-safe: the engine thread owns it. Reading never mutates. Memory is NaN-poisoned at allocation and on
    reset (unless `poison` is off), so that a row that was never written can't pass for state.
    """

    S: Tensor
    conv_ring: Tensor
    conv_grid: Tensor
    norm_rows: Tensor
    """[slots, 2, hidden]: final-norm rows of the last two consumed positions, at position % 2."""
    pages: Tensor

    def __init__(self, layout: StateLayout, slots: int, pages: int, device: torch.device, poison: bool) -> None:
        self.layout, self.slots, self.page_count, self.device, self.poison = layout, slots, pages, device, poison
        for name, spec in layout.slot_tensors.items():
            axis = self.slot_axis(name)
            shape = (*spec.shape[:axis], slots, *spec.shape[axis:])
            setattr(self, name, torch.empty(shape, dtype=TORCH_DTYPES[spec.dtype], device=device))
        page = layout.page_tensor
        self.pages = torch.empty((pages, *page.shape), dtype=TORCH_DTYPES[page.dtype], device=device)
        if poison:
            self.poison_all()
        self._opened: Final = [name for name in layout.slot_tensors if name.startswith("open_")]
        self.kda_layers: Final = tuple(self._kda_layer(i) for i in range(self.S.shape[0]))
        self.layer_pages: Final = tuple(self.pages[:, i] for i in range(self.pages.shape[1]))
        """Per MLA layer: a view [pages, 64, r + dr]."""

    @classmethod
    def allocate(
        cls, layout: StateLayout, slots: int, pages: int, device: torch.device | str = "cpu", poison: bool = True
    ) -> Self:
        """Allocate `slots` slots and `pages` pages on `device`; reset a slot before its first use."""
        return cls(layout, slots, pages, torch.device(device), poison)

    def _kda_layer(self, i: int) -> KdaLayer:
        opened: dict[str, Tensor] = {name.removeprefix("open_"): getattr(self, name)[i] for name in self._opened}
        return KdaLayer(self.S[i], opened, self.conv_ring[i], self.conv_grid[i])

    def poison_all(self) -> None:
        """Overwrite everything with NaN (integers: POISON_INT32)."""
        for name in self.layout.slot_tensors:
            _poison(getattr(self, name))
        _poison(self.pages)

    def poison_slot(self, slot: int) -> None:
        """Overwrite a slot with NaN, for tests and for slots that were given back."""
        for name in self.layout.slot_tensors:
            _poison(self._slot_view(name, slot))

    def poison_page(self, page: int) -> None:
        """Overwrite a page with NaN."""
        _poison(self.pages[page])

    def reset_slot(self, slot: int) -> None:
        """Make a slot the empty state: S and both conv tails zero; the rest poisoned."""
        if self.poison:
            self.poison_slot(slot)
        for name in ("S", "conv_ring", "conv_grid"):
            self._slot_view(name, slot).zero_()

    def copy_slot(self, source: int, target: int) -> None:
        """Copy all of a slot: S, open rows, conv tails, norm rows."""
        for name in self.layout.slot_tensors:
            self._slot_view(name, target).copy_(self._slot_view(name, source))

    def copy_page(self, source: int, target: int) -> None:
        """Copy a page, valid rows or not."""
        self.pages[target].copy_(self.pages[source])

    def finish_restore(self, slot: int, position: int) -> None:
        """After all parts of the checkpoint at grid position `position` are written: fill the live conv ring from the
        grid tail, and poison what a checkpoint does not hold (open rows, norm rows)."""
        if self.poison:
            for name in (*self._opened, "conv_ring"):
                _poison(self._slot_view(name, slot))
        # Not optional: a stale row of the slot's last session would be sampled from as if it were this one's.
        _poison(self.norm_rows[slot])
        for back in range(1, CONV_TAPS):
            self.conv_ring[:, slot, (position - back) % CONV_TAPS].copy_(self.conv_grid[:, slot, CONV_TAPS - 1 - back])

    def _slot_view(self, name: str, slot: int) -> Tensor:
        tensor: Tensor = getattr(self, name)
        return tensor.select(self.slot_axis(name), slot)

    @staticmethod
    def slot_axis(name: str) -> int:
        """The axis of a tensor of slots that numbers them."""
        return 0 if name == "norm_rows" else 1
