"""WeightTable: a model's tensors by published name, each fetched to the device when a layer asks for it."""

from collections.abc import Callable
from typing import Self

from torch import Tensor


class WeightTable:
    """`fetch` gives the tensor of a full name, on the device and in the dtype that the kernels read. `prefix` is put
    before every name that is asked for."""

    def __init__(self, fetch: Callable[[str], Tensor], prefix: str = "") -> None:
        self._fetch, self._prefix = fetch, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._fetch(self._prefix + name)

    def inside(self, prefix: str) -> Self:
        """The tensors whose names go on with `prefix`."""
        return type(self)(self._fetch, self._prefix + prefix)
