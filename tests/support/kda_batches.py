"""Many sequences of one layer at once, fed by prefill and decode in any mix: what the GPU tests of KDA share."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from forkpoint.kernels.kda.triton.launch import PINNED, KdaState, Shapes
from tests.support.kernels import same_bytes
from tests.support.triton_kda import (
    Layer,
    Piece,
    feed_decode,
    feed_prefill,
    layer_inputs,
    poisoned_state,
    start_slot,
    tensors_of,
)


def _switched() -> Shapes:
    values: dict[str, Any] = {field.name: getattr(PINNED, field.name) for field in fields(PINNED)}
    return replace(PINNED, **{name: not value for name, value in values.items() if isinstance(value, bool)})


SWITCHED = _switched()
"""The pinned shapes with every switch turned: how kernels follow each other must not show."""


@dataclass(frozen=True)
class Batch:
    """Sequences of one layer and their slots; slot 0, the last and those between are nobody's."""

    layers: list[Layer]
    slots: list[int]

    @property
    def count(self) -> int:
        return self.slots[-1] + 2

    def state(self, device: torch.device, pool: torch.dtype = torch.float32) -> KdaState:
        """A poisoned pool with every sequence at position 0."""
        state = poisoned_state(self.count, self.layers[0].heads, device, pool)
        for slot, layer in zip(self.slots, self.layers, strict=True):
            start_slot(state, slot, layer)
        return state

    def pieces(self, first: int | list[int], last: int | list[int]) -> list[Piece]:
        """Rows first:last of every sequence, the same for all or one for each."""
        firsts = [first] * len(self.slots) if isinstance(first, int) else first
        lasts = [last] * len(self.slots) if isinstance(last, int) else last
        return [(slot, layer, a, b) for slot, layer, a, b in zip(self.slots, self.layers, firsts, lasts, strict=True)]

    def step(self, state: KdaState, positions: list[int], shapes: Shapes | None = PINNED) -> list[Tensor]:
        """One decode step of all, a null slot in their midst: o [1, H, 128] of each."""
        rows = list(zip(self.slots, self.layers, positions, strict=True))
        middle = len(rows) // 2
        o = feed_decode(state, [*rows[:middle], (-1, self.layers[0], 0), *rows[middle:]], shapes)
        assert not o[middle].any()
        return list(torch.split(torch.cat((o[:middle], o[middle + 1 :])), 1))

    def neighbours(self) -> list[int]:
        """Slots that belong to no sequence."""
        return [slot for slot in range(self.count) if slot not in self.slots]


def make_batch(count: int, tokens: int, heads: int, lower_bound: float | None, device: torch.device) -> Batch:
    first = layer_inputs(tokens, heads, lower_bound, device)
    others = [layer_inputs(tokens, heads, lower_bound, device, first.weights) for _ in range(count - 1)]
    return Batch([first, *others], [2 * n + 1 for n in range(count)])


def whole_prefill(batch: Batch, ends: list[int], device: torch.device) -> tuple[KdaState, list[Tensor]]:
    """Every sequence up to its end in one packed call with the pinned shapes: what all other ways must give."""
    state = batch.state(device)
    out = feed_prefill(state, batch.pieces(0, ends), shapes=PINNED)
    assert all(o.isfinite().all() for o in out)
    return state, out


def same_slots(a: KdaState, b: KdaState, batch: Batch, ends: list[int]) -> None:
    """Asserts that the sequences' S, tails and open tiles agree, and that nobody's slots are as at the beginning."""
    for x, y in ((a.S, b.S), (a.conv_ring, b.conv_ring), (a.conv_grid, b.conv_grid)):
        assert same_bytes(x, y)
    for slot, end in zip(batch.slots, ends, strict=True):
        rows = end % 16
        for name, x in vars(a.opened).items():
            y = getattr(b.opened, name)
            if name == "total":
                assert rows == 0 or same_bytes(x[slot], y[slot]), (name, slot)
            elif name == "reference":
                assert rows <= 8 or same_bytes(x[slot], y[slot]), (name, slot)
            else:
                assert same_bytes(x[slot, :rows], y[slot, :rows]), (name, slot)
    fresh = poisoned_state(1, a.S.shape[1], a.S.device, a.S.dtype)
    for state in (a, b):
        for tensor, old in zip(tensors_of(state), tensors_of(fresh), strict=True):
            for slot in batch.neighbours():
                assert same_bytes(tensor[slot], old[0])
