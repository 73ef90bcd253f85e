"""Tensors that count their readings, and how many of them are kept at once."""

import weakref
from collections.abc import Iterator, Mapping

from torch import Tensor

from forkpoint.model.shard import TensorSpec
from forkpoint.model.tensors import TensorSource, as_source


class CountedTensors(TensorSource):
    """`reads` by name; `kept` are the bytes that were read and not dropped yet, `kept_most` their maximum."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._source = as_source(tensors)
        self.problems, self.unreadable = self._source.problems, self._source.unreadable
        self.reads: dict[str, int] = {}
        self.kept = self.kept_most = 0

    def spec(self, name: str) -> TensorSpec:
        return self._source.spec(name)

    def __getitem__(self, name: str) -> Tensor:
        self.reads[name] = self.reads.get(name, 0) + 1
        read = self._source[name].clone()
        self.kept += read.nbytes
        self.kept_most = max(self.kept_most, self.kept)
        # The storage, for views of a tensor keep it and not the tensor.
        weakref.finalize(read.untyped_storage(), self._drop, read.nbytes)
        return read

    def _drop(self, nbytes: int) -> None:
        self.kept -= nbytes

    def __iter__(self) -> Iterator[str]:
        return iter(self._source)

    def __len__(self) -> int:
        return len(self._source)
