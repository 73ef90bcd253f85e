"""The seam between the model and what computes it: one `Kernels`, chosen once by the device, and a `Step` a batch.

TorchKernels (torch_kernels.py) are the definitions, in fp32, on any device. TritonKernels (triton_kernels.py) run on a
GPU, in bf16 with fp32 sums. Layers see this file only, and a session's bytes belong to the one that made them: dtypes
and layout of the state follow from it, and the numerics id names it.
"""

import importlib.util
import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from forkpoint.kernels.experts.weights import Experts
from forkpoint.kernels.ffn.activation import Activation
from forkpoint.kernels.kda.triton.state import KdaWeights
from forkpoint.kernels.router.routes import Router, Routes
from forkpoint.kernels.sampler.naive import SamplingRows
from forkpoint.kernels.staging.pieces import Table
from forkpoint.model.config import ModelConfig
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import StateDtypes, StateTensors
from forkpoint.model.step import Step
from forkpoint.model.torch_kernels import TorchKernels

__all__ = ["KdaWeights", "Kernels", "Step", "choose_kernels"]

log = logging.getLogger(__name__)


class Kernels(Protocol):
    """Row functions: a row's bits depend on that row and on the weights, never on the rows beside it."""

    @property
    def name(self) -> str:
        """For logs and for the numerics id."""
        ...

    @property
    def compute_dtype(self) -> torch.dtype:
        """Of activations and of matrices in memory."""
        ...

    @property
    def dtypes(self) -> StateDtypes:
        """Of the state: what the layout of slots and pages is made with."""
        ...

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of the tensor of a published name on the device, in the dtype that these kernels read; uint8 stays
        uint8. It must not share memory with `tensor`, which may be a mapped file."""
        ...

    def per_head_weight(self, weight: Tensor) -> Tensor:
        """A weight [H, A, B] in the form that `per_head` takes."""
        ...

    def run(self, batch: RowBatch, tensors: StateTensors, layers: Callable[[Step], Tensor], replay: bool) -> Tensor:
        """Plans one batch over the slots and pages of `tensors` and runs `layers`, the same in every call, on it: their
        result [R, hidden]. `replay`: they may be recorded in one step and replayed in a later one."""
        ...

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [R, K] times weight [N, K] transposed: [R, N]."""
        ...

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [R, H, A] times a weight [H, A, B] (`per_head_weight`) head by head: [R, H, B]."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Rows [R, D], weight [D]."""
        ...

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Residual rows x + delta [R, hidden], and rms_norm of them. `x` is given up."""
        ...

    def mix_norm(
        self, bank: Tensor, x: Tensor, delta: Tensor | None, mix: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Attention Residuals: the sum x + delta [R, hidden], and rms_norm of the mixture of bank [n, R, hidden] and
        that sum, n >= 1, scored by mix [hidden] fp32. `x` is given up."""
        ...

    def gated_rms_norm(self, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm(o) sigmoid(gate): o [R, H, V], gate [R, H V], weight [V] -> [R, H V]."""
        ...

    def glu(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """The activation of gate and up: [R, F] each."""
        ...

    def route(self, x: Tensor, router: Router) -> Routes:
        """Routes of normed rows x [R, hidden], from fp32 logits; ties go to the lower expert id."""
        ...

    def experts_sum(
        self, x: Tensor, routes: Routes, weights: Experts, activation: Activation, shared: Tensor | None
    ) -> Tensor:
        """Σ weight · expert(x) over each row's experts in ascending id, fp32, plus its row of `shared` [R, D]:
        x [R, D] -> [R, D], rounded once."""
        ...

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """x sigmoid(gate): [R, N] each."""
        ...

    def logits(self, rows: Tensor, head: Tensor) -> Tensor:
        """fp32 logits [B, vocab] of final-norm rows [B, hidden]; head [vocab, hidden]."""
        ...

    def gather(self, table: Table, buffer: Tensor, places: list[int]) -> None:
        """Copies a table's pieces at `places` into the buffer, uint8, at least the table's bytes, on their device."""
        ...

    def scatter(self, table: Table, buffer: Tensor, places: list[int]) -> None:
        """The inverse: what lies between and around the pieces is left alone."""
        ...

    def sample(self, logits: Tensor, rows: SamplingRows, filtered: bool) -> tuple[Tensor, Tensor]:
        """One token a row of fp32 logits [B, vocab], all finite: ids int64 [B] and logprobs [B].

        `filtered`: whether any row has top-k or top-p, so that a GPU need not be asked.
        """
        ...


def choose_kernels(config: ModelConfig, device: torch.device) -> Kernels:
    """Triton on a GPU whose kernels take this model, else plain torch, with the reason in the log."""
    if device.type != "cuda":
        return TorchKernels(device)
    if importlib.util.find_spec("triton") is None:
        reason: str | None = "triton is not installed"
    else:
        # Triton is a GPU's: a CPU never imports it.
        from forkpoint.model.triton_kernels import TritonKernels, why_not

        reason = why_not(config, torch.cuda.get_device_capability(device))
        if reason is None:
            return TritonKernels(config, device)
    log.warning("%s: plain torch on %s, exact and slow: %s", config.source, device, reason)
    return TorchKernels(device)
