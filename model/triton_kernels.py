"""TritonKernels: bf16 rows and matrices, fp32 sums and residuals, on a GPU. Importing this imports triton."""

from collections.abc import Callable

import torch
from torch import Tensor

from forkpoint.kernels.attn_res import triton as attn_res
from forkpoint.kernels.experts.triton import launch as experts
from forkpoint.kernels.experts.weights import Experts
from forkpoint.kernels.ffn.activation import Activation
from forkpoint.kernels.ffn.triton import glu, sigmoid_gate
from forkpoint.kernels.filters.triton import VOCABULARY_MAX
from forkpoint.kernels.kda.triton import limits as kda_limits
from forkpoint.kernels.matmul.triton import linear
from forkpoint.kernels.mla.triton.launch import RANK_MAX, ROPE_MAX, works_of
from forkpoint.kernels.norm.triton import WIDTH_MAX, add_rms_norm, gated_rms_norm, rms_norm
from forkpoint.kernels.per_head.triton import per_head_linear
from forkpoint.kernels.router.routes import Router, Routes
from forkpoint.kernels.router.triton import route
from forkpoint.kernels.sampler.naive import SamplingRows
from forkpoint.kernels.sampler.triton import sample
from forkpoint.kernels.staging import triton as staging
from forkpoint.kernels.staging.pieces import Table
from forkpoint.kernels.tables import one_copy
from forkpoint.model.config import ModelConfig
from forkpoint.model.inventory import kept_dtype
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import TORCH_DTYPES, StateDtypes, StateTensors
from forkpoint.model.step import Step
from forkpoint.model.step_graphs import CudaRecorder, Recorder, StepGraphs
from forkpoint.model.triton_step import HostStep, TritonStep


def why_not(config: ModelConfig, capability: tuple[int, int]) -> str | None:
    """Why a model's shapes do not suit the Triton kernels on a GPU of this compute capability, or None."""
    if config.kda_layers:
        pool = TORCH_DTYPES[TritonKernels.dtypes.kda]
        sizes = config.kda_key_dim, config.kda_value_dim
        if reason := kda_limits.why_not(*sizes, config.gate_lower_bound, pool, capability):
            return reason
    rank_max = RANK_MAX[TritonKernels.compute_dtype]
    for name, size, most in (
        ("kv_lora_rank", config.kv_lora_rank, rank_max),
        ("qk_rope_head_dim", config.qk_rope_head_dim, ROPE_MAX),
    ):
        if config.mla_layers and (size < 16 or size > most or size & (size - 1)):
            return f"{name} is {size}, not a power of two from 16 to {most}"
    if config.hidden_size > WIDTH_MAX:
        return f"rows of {config.hidden_size} values: at most {WIDTH_MAX}"
    if config.vocab_size > VOCABULARY_MAX:
        return f"a vocabulary of {config.vocab_size}: at most {VOCABULARY_MAX}"
    if (moe := config.moe) is not None:
        width = moe.latent_size or config.hidden_size
        return experts.why_not_sizes(moe.experts, moe.per_token, width, moe.intermediate_size)
    return None


class TritonKernels:
    """See `Kernels`. The interpreter runs them on a CPU, for tests."""

    name: str = "triton"
    compute_dtype: torch.dtype = torch.bfloat16
    dtypes: StateDtypes = StateDtypes(kda="float32", activation="bfloat16", opened="factors")

    def __init__(self, config: ModelConfig, device: torch.device, recorder: Recorder | None = None) -> None:
        """`recorder`: of decode steps; by default a GPU's."""
        self._device = device
        sizes = config.mla_heads, config.kv_lora_rank, self.compute_dtype
        self._attention = works_of(*sizes) if config.mla_layers else None
        self._recorder = CudaRecorder(device) if recorder is None and device.type == "cuda" else recorder
        self._graphs: StepGraphs | None = None
        self._graphs_of: StateTensors | None = None

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, TORCH_DTYPES[kept_dtype(name, tensor.shape)], copy=True).contiguous()

    def per_head_weight(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def run(self, batch: RowBatch, tensors: StateTensors, layers: Callable[[Step], Tensor], replay: bool) -> Tensor:
        step = HostStep.of(batch, self._attention)
        if replay and step.may_recur and (graphs := self._graphs_over(tensors)) is not None:
            padded = step.padded()
            rows = graphs.run(padded.tables(), lambda tables: layers(TritonStep(padded.there(tables), tensors)))
            if rows is not None:
                return rows
        return layers(TritonStep(step.there(one_copy(step.tables(), self._device)), tensors))

    def _graphs_over(self, tensors: StateTensors) -> StepGraphs | None:
        if self._recorder is not None and self._graphs_of is not tensors:
            self._graphs, self._graphs_of = StepGraphs(self._device, self._recorder), tensors
        return self._graphs

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, self.compute_dtype)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return per_head_linear(x.to(self.compute_dtype), weight, self.compute_dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x, weight, eps, self.compute_dtype)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if delta is None:
            return x, rms_norm(x, weight, eps, self.compute_dtype)
        return add_rms_norm(x, delta, weight, eps, self.compute_dtype)

    def gated_rms_norm(self, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return gated_rms_norm(o, gate.reshape(o.shape), weight, eps, self.compute_dtype).flatten(1)

    def mix_norm(
        self, bank: Tensor, x: Tensor, delta: Tensor | None, mix: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        return attn_res.mix_norm(bank, x, delta, mix, weight, eps, self.compute_dtype)

    def glu(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return glu(gate, up, activation)

    def route(self, x: Tensor, router: Router) -> Routes:
        return route(x, router)

    def experts_sum(
        self, x: Tensor, routes: Routes, weights: Experts, activation: Activation, shared: Tensor | None
    ) -> Tensor:
        return experts.experts_sum(x, routes, weights, activation, shared)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        return sigmoid_gate(x, gate)

    def logits(self, rows: Tensor, head: Tensor) -> Tensor:
        return linear(rows, head, torch.float32)

    def gather(self, table: Table, buffer: Tensor, places: list[int]) -> None:
        staging.gather(table, buffer, places)

    def scatter(self, table: Table, buffer: Tensor, places: list[int]) -> None:
        staging.scatter(table, buffer, places)

    def sample(self, logits: Tensor, rows: SamplingRows, filtered: bool) -> tuple[Tensor, Tensor]:
        return sample(logits, rows, filtered)
