"""The tensors that an object holds, whatever it is made of."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass

from torch import Tensor

from forkpoint.model.torch_kernels import TorchKernels


def held_tensors(thing: object, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor in attributes, dataclass fields and sequences, once each; what computes is not looked into."""
    seen = set() if seen is None else seen
    if id(thing) in seen or isinstance(thing, TorchKernels | type | str | int | float):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    parts: list[object] = []
    if isinstance(thing, tuple | list):
        parts = list(thing)
    elif is_dataclass(thing):
        parts = [getattr(thing, field.name) for field in fields(thing)]
    elif hasattr(thing, "__dict__"):
        parts = list(vars(thing).values())
    for part in parts:
        yield from held_tensors(part, seen)
