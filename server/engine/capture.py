"""Parts out of a slot and its pages, and back: what a checkpoint is made of."""

from collections.abc import Mapping
from typing import Final

import torch

from forkpoint.errors import StateIncompatibleError
from forkpoint.model.state import TORCH_DTYPES, StateTensors
from forkpoint.parts import PartSpec
from forkpoint.server.engine.base import Capture
from forkpoint.server.engine.errors import NonFiniteStateError
from forkpoint.server.engine.sequences import LiveSequence, pages_for

SABOTAGES: Final = ("conv-tail",)
"""Deliberate faults, for tests of the tests: `conv-tail` flips the sign of one value of a restored conv tail."""


def capture(tensors: StateTensors, sequence: LiveSequence) -> Capture:
    """The state at the sequence's last grid point, in memory of its own.

    {S, grid conv tails, latents before the grid point} is that state at any moment, so a capture waits for nothing.
    Raises NonFiniteStateError: unwritten (poisoned) or overflown memory must never become a checkpoint.
    """
    grid = sequence.grid_position
    slot, pages = sequence.slot, sequence.pages[: pages_for(grid)]
    if tensors.device.type != "cpu":
        tensors, slot, pages = tensors.on_host(slot, pages), 0, list(range(len(pages)))
    parts: list[tuple[PartSpec, bytes]] = []
    for spec in tensors.layout.parts(grid):
        data = tensors.read_part(spec, slot, pages)
        if not is_finite(spec, data):
            raise NonFiniteStateError(sequence.handle, spec.name)
        parts.append((spec, data))
    return Capture(grid, tuple(parts))


def is_finite(spec: PartSpec, data: bytes) -> bool:
    """Whether a part's bytes hold neither NaN nor infinity."""
    if not data:
        return True
    return bool(torch.isfinite(torch.frombuffer(bytearray(data), dtype=TORCH_DTYPES[spec.dtype])).all())


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
