"""Parts out of a slot and its pages, and back: what a checkpoint is made of."""

from collections.abc import Collection, Mapping
from typing import Final

import torch

from forkpoint.errors import StateIncompatibleError
from forkpoint.model.layout import StateLayout
from forkpoint.model.staging import StateStaging
from forkpoint.model.state import TORCH_DTYPES
from forkpoint.parts import PartSpec
from forkpoint.server.engine.base import Capture
from forkpoint.server.engine.errors import NonFiniteStateError
from forkpoint.server.engine.sequences import LiveSequence

SABOTAGES: Final = ("conv-tail",)
"""Deliberate faults, for tests of the tests: `conv-tail` flips the sign of one value of a restored conv tail."""


def capture(staging: StateStaging, sequence: LiveSequence, layout: StateLayout, known: Collection[str] = ()) -> Capture:
    """The state at the sequence's last grid point, in memory of its own, without full pages whose names are `known`.

    {S, grid conv tails, latents before the grid point} is that state at any moment, so a capture waits for nothing.
    Raises NonFiniteStateError: unwritten (poisoned) or overflown memory must never become a checkpoint.
    """
    grid = sequence.grid_position
    specs, settled = layout.parts(grid), frozenset(layout.settled_parts(grid))
    parts: list[tuple[PartSpec, bytes]] = []
    for spec, data in staging.read(grid, sequence.slot, sequence.pages, settled.intersection(known)):
        if not torch.isfinite(data.view(TORCH_DTYPES[spec.dtype])).all():
            raise NonFiniteStateError(sequence.handle, spec.name)
        parts.append((spec, data.numpy().tobytes()))
    return Capture(grid, tuple(parts), specs, settled)


def check_part(known: Mapping[str, PartSpec], spec: PartSpec, data: bytes | bytearray | memoryview) -> None:
    """Raise StateIncompatibleError unless `spec` is one of the `known` parts and `data` has its size."""
    ours = known.get(spec.name)
    if ours != spec:
        raise StateIncompatibleError(f"part {spec.name}", _shown(spec), _shown(ours) if ours else "no such part")
    if len(data) != spec.nbytes:
        raise StateIncompatibleError(f"part {spec.name}", f"{len(data)} bytes", f"{spec.nbytes} bytes")


def flip_a_sign(spec: PartSpec, data: bytes | bytearray | memoryview) -> bytes:
    """`data` with the sign bit of its value of largest magnitude flipped; unchanged when all values are zero."""
    damaged = bytearray(data)
    values = torch.frombuffer(damaged, dtype=TORCH_DTYPES[spec.dtype])
    index = int(values.abs().argmax())
    values[index] = -values[index]
    return bytes(damaged)


def _shown(spec: PartSpec) -> str:
    return f"{spec.dtype} {list(spec.shape)}"
