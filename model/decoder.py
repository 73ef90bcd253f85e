"""HybridDecoder: KDA and MLA layers over packed rows, from token ids to final-norm rows and logits."""

from collections.abc import Mapping
from typing import Final, Protocol

import torch
from torch import Tensor

from forkpoint.kernels.matmul.naive import linear
from forkpoint.kernels.norm.naive import rms_norm
from forkpoint.limits import NORM_ROWS
from forkpoint.model.config import ModelConfig
from forkpoint.model.ffn import SwigluFfn
from forkpoint.model.kda_layer import KdaAttention
from forkpoint.model.mla_layer import MlaAttention
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import StateTensors
from forkpoint.model.weights import check_weights

COMPUTE_DTYPE: Final = torch.float32
"""Dtype of activations and of weights in memory: published weights are bf16 values, computed in fp32."""


class Attention(Protocol):
    """What a decoder layer asks of its attention: rows in, rows out, state and pages updated."""

    def forward(self, x: Tensor, batch: RowBatch, tensors: StateTensors) -> Tensor: ...


class FeedForward(Protocol):
    """What a decoder layer asks of its feed-forward block. The seam for a mixture of experts."""

    def forward(self, x: Tensor) -> Tensor: ...


class DecoderLayer:
    """Pre-norm attention and feed-forward with plain residuals: the one place that Attention Residuals will replace."""

    def __init__(
        self, attention_norm: Tensor, attention: Attention, ffn_norm: Tensor, ffn: FeedForward, eps: float
    ) -> None:
        self.attention_norm, self.attention, self.ffn_norm, self.ffn = attention_norm, attention, ffn_norm, ffn
        self.eps = eps

    def forward(self, x: Tensor, batch: RowBatch, tensors: StateTensors) -> Tensor:
        """Residual rows [R, hidden] to residual rows [R, hidden]."""
        x = x + self.attention.forward(rms_norm(x, self.attention_norm, self.eps), batch, tensors)
        return x + self.ffn.forward(rms_norm(x, self.ffn_norm, self.eps))


class HybridDecoder:
    """The model. `state(p)` is a function of the tokens alone: no result depends on the batch or on the cut.

    `weights` maps published tensor names (`model.layers.0.self_attn.q_proj.weight`, ...) to tensors of any float dtype.
    Raises ModelConfigError for a config beyond this version, and WeightsError for tensors that do not fit it.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        config.require_runnable()
        weights = check_weights(config, weights)
        self.config, self.device = config, torch.device(device)
        table = {name: tensor.to(self.device, COMPUTE_DTYPE).contiguous() for name, tensor in weights.items()}
        self.embedding = table["model.embed_tokens.weight"]
        self.head = self.embedding if config.tie_word_embeddings else table["lm_head.weight"]
        self.norm = table["model.norm.weight"]
        self.layers = tuple(_build_layer(config, table, layer) for layer in range(config.num_layers))

    @torch.inference_mode()
    def forward(self, batch: RowBatch, tensors: StateTensors) -> Tensor:
        """Consume the batch's rows: [R, hidden], the final-norm row of each.

        Updates each sequence's slot and pages, and stores the final-norm rows of its last two consumed positions.
        Writes only to the batch's slots and to the pages of the rows' positions.
        """
        batch.check(self.config.vocab_size)
        x = self.embedding[torch.tensor(batch.token_ids, dtype=torch.int64, device=self.device)]
        for layer in self.layers:
            x = layer.forward(x, batch, tensors)
        x = rms_norm(x, self.norm, self.config.rms_norm_eps)
        _store_norm_rows(x, batch, tensors)
        return x

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Logits [B, vocab] fp32 of final-norm rows [B, hidden]."""
        return linear(rows, self.head)


def _store_norm_rows(x: Tensor, batch: RowBatch, tensors: StateTensors) -> None:
    """Keep the rows of each sequence's last two positions in its slot, by position % 2."""
    slots, places, rows = [], [], []
    for sequence, slot in enumerate(batch.slots):
        end_row, length = batch.cu_seqlens[sequence + 1], batch.length(sequence)
        end = batch.starts[sequence] + length
        for back in range(1, min(NORM_ROWS, length) + 1):
            slots.append(slot)
            places.append((end - back) % NORM_ROWS)
            rows.append(end_row - back)
    if rows:
        tensors.norm_rows[slots, places] = x[rows]


def _build_layer(config: ModelConfig, table: Mapping[str, Tensor], layer: int) -> DecoderLayer:
    prefix = f"model.layers.{layer}."

    def inside(block: str) -> dict[str, Tensor]:
        start = prefix + block
        return {name[len(start) :]: tensor for name, tensor in table.items() if name.startswith(start)}

    attention: Attention
    if config.layer_kinds[layer] == "kda":
        attention = KdaAttention(config, inside("self_attn."), config.kda_layers.index(layer))
    else:
        attention = MlaAttention(config, inside("self_attn."), config.mla_layers.index(layer))
    return DecoderLayer(
        table[prefix + "input_layernorm.weight"],
        attention,
        table[prefix + "post_attention_layernorm.weight"],
        SwigluFfn(inside("mlp.")),
        config.rms_norm_eps,
    )
