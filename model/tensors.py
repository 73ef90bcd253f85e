"""TensorSource: a model's tensors, known before they are read; and the error that reports all that is wrong."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.model.shard import TensorSpec

_PROBLEMS_SHOWN: Final = 20


class WeightsError(ConfigError):
    """The tensors of a model do not fit its config. One error reports every problem; `problems` lists them."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        shown = list(problems[:_PROBLEMS_SHOWN])
        more = [f"and {len(problems) - len(shown)} more"] if len(problems) > len(shown) else []
        super().__init__("weights", source, "; ".join(shown + more))
        self.problems = list(problems)


class TensorSource(Mapping[str, Tensor]):
    """Tensors by their stored names. Asking for one may read it from a disk, every time; `spec` reads nothing.

    A tensor lasts as long as it is kept, and is not to be written.
    """

    problems: Sequence[str] = ()
    """What is wrong with the files, for the report on the tensors."""
    unreadable: frozenset[str] = frozenset()
    """Names of tensors that `problems` accounts for: they are not to be called missing besides."""

    @abstractmethod
    def spec(self, name: str) -> TensorSpec:
        """Dtype and shape of a tensor. Raises KeyError."""


class TensorsInMemory(TensorSource):
    """Tensors that are there already."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def spec(self, name: str) -> TensorSpec:
        tensor = self._tensors[name]
        return TensorSpec(tensor.dtype, tuple(tensor.shape))

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def as_source(tensors: Mapping[str, Tensor]) -> TensorSource:
    """`tensors` themselves where they are a source already."""
    return tensors if isinstance(tensors, TensorSource) else TensorsInMemory(tensors)
