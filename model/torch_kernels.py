"""TorchKernels: the plain-torch definitions in fp32, exact on a CPU, and on a GPU for what Triton does not take."""

from collections.abc import Callable

import torch
from torch import Tensor

from forkpoint.kernels.attn_res import naive as attn_res
from forkpoint.kernels.conv.naive import causal_conv
from forkpoint.kernels.elementwise import sigmoid
from forkpoint.kernels.experts.naive import experts_sum
from forkpoint.kernels.experts.weights import Experts
from forkpoint.kernels.ffn.activation import Activation
from forkpoint.kernels.ffn.naive import glu
from forkpoint.kernels.kda.naive import OpenRows, kda_gate, tile_kda
from forkpoint.kernels.kda.triton.state import KdaWeights
from forkpoint.kernels.matmul.naive import linear, per_head_product
from forkpoint.kernels.mla.naive import paged_mla, write_latents
from forkpoint.kernels.norm.naive import gated_rms_norm, l2_norm, rms_norm
from forkpoint.kernels.router.naive import route
from forkpoint.kernels.router.routes import Router, Routes
from forkpoint.kernels.sampler.naive import SamplingRows, sample
from forkpoint.kernels.staging import naive as staging
from forkpoint.kernels.staging.pieces import Table
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import StateDtypes, StateTensors
from forkpoint.model.step import Step


class TorchStep:
    """A batch in the order that it came in. The twins plan by themselves, once for all layers (they remember)."""

    def __init__(self, batch: RowBatch, tensors: StateTensors) -> None:
        self._batch, self._tensors = batch, tensors

    def embed(self, table: Tensor) -> Tensor:
        return table[torch.tensor(self._batch.token_ids, dtype=torch.int64, device=table.device)]

    def kda(self, x: Tensor, z: Tensor, b: Tensor, weights: KdaWeights, layer: int) -> Tensor:
        batch, state, rows = self._batch, self._tensors.kda_layers[layer], x.shape[0]
        heads, key = weights.dt_bias.shape
        where = batch.slots, batch.cu_seqlens, batch.starts
        mixed = causal_conv(x, weights.conv.t(), state.conv_ring, state.conv_grid, *where)
        query_key = l2_norm(mixed[:, : 2 * heads * key].reshape(rows, 2 * heads, key))
        return tile_kda(
            query_key[:, :heads] * key**-0.5,
            query_key[:, heads:],
            mixed[:, 2 * heads * key :].reshape(rows, heads, state.S.shape[2]),
            kda_gate(z.view(rows, heads, key), weights.A_log, weights.dt_bias, weights.lower_bound),
            sigmoid(b),
            state.S,
            OpenRows(**state.opened),
            *where,
            weights.lower_bound,
        )

    def attend(self, q: Tensor, latents: Tensor, rank: int, scale: float, layer: int) -> Tensor:
        batch, pages = self._batch, self._tensors.layer_pages[layer]
        write_latents(latents, pages, batch.page_tables, batch.cu_seqlens, batch.starts)
        return paged_mla(q, pages, batch.page_tables, rank, scale, batch.cu_seqlens, batch.starts)

    def finish(self, rows: Tensor) -> Tensor:
        if kept := self._batch.kept_rows():
            slots, places, sources = (list(column) for column in zip(*kept, strict=True))
            self._tensors.norm_rows[slots, places] = rows[sources]
        return rows


class TorchKernels:
    """See `Kernels`."""

    name: str = "torch"
    compute_dtype: torch.dtype = torch.float32
    dtypes: StateDtypes = StateDtypes()

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        dtype = tensor.dtype if tensor.dtype == torch.uint8 else self.compute_dtype
        return tensor.to(self._device, dtype, copy=True).contiguous()

    def per_head_weight(self, weight: Tensor) -> Tensor:
        return weight.contiguous()

    def run(self, batch: RowBatch, tensors: StateTensors, layers: Callable[[Step], Tensor], replay: bool) -> Tensor:
        return layers(TorchStep(batch, tensors))

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return per_head_product(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return rms_norm(x.contiguous(), weight, eps)

    def add_norm(self, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x if delta is None else x + delta
        return x, rms_norm(x, weight, eps)

    def gated_rms_norm(self, o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        return gated_rms_norm(o, gate.reshape(o.shape), weight, eps).flatten(1)

    def mix_norm(
        self, bank: Tensor, x: Tensor, delta: Tensor | None, mix: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        x = x if delta is None else x + delta
        return x, rms_norm(attn_res.mix(bank, x, mix, eps), weight, eps)

    def glu(self, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return glu(gate, up, activation)

    def route(self, x: Tensor, router: Router) -> Routes:
        return route(x, router)

    def experts_sum(
        self, x: Tensor, routes: Routes, weights: Experts, activation: Activation, shared: Tensor | None
    ) -> Tensor:
        return experts_sum(x, routes, weights, activation, shared)

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * sigmoid(gate)

    def logits(self, rows: Tensor, head: Tensor) -> Tensor:
        return linear(rows, head)

    def gather(self, table: Table, buffer: Tensor, places: list[int]) -> None:
        staging.gather(table, buffer, places)

    def scatter(self, table: Table, buffer: Tensor, places: list[int]) -> None:
        staging.scatter(table, buffer, places)

    def sample(self, logits: Tensor, rows: SamplingRows, filtered: bool) -> tuple[Tensor, Tensor]:
        return sample(logits, rows)
