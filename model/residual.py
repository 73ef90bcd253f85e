"""The residual stream between blocks: a plain sum, or Attention Residuals over a bank of earlier blocks' sums."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from forkpoint.model.kernels import Kernels
from forkpoint.model.table import WeightTable


@dataclass(frozen=True, slots=True)
class BlockNorm:
    """What turns the stream into the input of one block: the norm's weight [hidden], and of Attention Residuals the
    product γ ⊙ p [hidden] fp32 that scores the sources (None: plain residuals)."""

    weight: Tensor
    mix: Tensor | None = None


def mix_weight(table: WeightTable, name: str) -> Tensor:
    """γ ⊙ p of `NAME_norm.weight` and `NAME_proj.weight`, formed in fp32 (or in the norm's dtype if that is wider)."""
    norm, projection = table[f"{name}_norm.weight"], table[f"{name}_proj.weight"]
    return norm * projection.view(-1).to(norm.dtype)


class Stream(Protocol):
    """The rows of one step on their way through the layers."""

    def open_block(self) -> None:
        """Said before the attention of a layer that begins a block of Attention Residuals, after its input was read."""
        ...

    def read(self, norm: BlockNorm, eps: float) -> Tensor:
        """The normed input [R, hidden] of the next sublayer."""
        ...

    def add(self, delta: Tensor) -> None:
        """What the sublayer gives [R, hidden]."""
        ...


class PlainStream:
    """x += delta. The sum waits for the next norm, so that one kernel may do both."""

    def __init__(self, x: Tensor, kernels: Kernels) -> None:
        self._x, self._kernels = x, kernels
        self._delta: Tensor | None = None

    def open_block(self) -> None:
        pass

    def read(self, norm: BlockNorm, eps: float) -> Tensor:
        self._x, normed = self._kernels.add_norm(self._x, self._delta, norm.weight, eps)
        self._delta = None
        return normed

    def add(self, delta: Tensor) -> None:
        self._delta = delta


class MixedStream:
    """Attention Residuals (K3): the input of a sublayer is a mixture of the bank and of the sum since the bank's last
    entry; opening a block moves that sum to the bank, raw, and the sum starts again from the next delta alone."""

    def __init__(self, x: Tensor, blocks: int, kernels: Kernels) -> None:
        self._x: Tensor | None = x
        self._delta: Tensor | None = None
        self._kernels = kernels
        self._bank, self._banked = x.new_empty((blocks, *x.shape)), 0

    def open_block(self) -> None:
        assert self._x is not None and self._delta is None
        self._bank[self._banked] = self._x
        self._banked += 1
        self._x = None

    def read(self, norm: BlockNorm, eps: float) -> Tensor:
        if self._x is None:
            # The first delta of a block, in the dtype of the stream.
            assert self._delta is not None
            self._x, self._delta = self._delta.to(self._bank.dtype), None
        if not self._banked or norm.mix is None:
            self._x, normed = self._kernels.add_norm(self._x, self._delta, norm.weight, eps)
        else:
            bank = self._bank[: self._banked]
            self._x, normed = self._kernels.mix_norm(bank, self._x, self._delta, norm.mix, norm.weight, eps)
        self._delta = None
        return normed

    def add(self, delta: Tensor) -> None:
        self._delta = delta
