"""HybridDecoder: KDA and MLA layers over packed rows, from token ids to final-norm rows and logits."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.model.ffn import SwigluFfn
from forkpoint.model.kda_layer import KdaAttention
from forkpoint.model.kernels import Kernels, Step, choose_kernels
from forkpoint.model.mla_layer import MlaAttention
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import StateTensors
from forkpoint.model.weights import check_weights


class Attention(Protocol):
    """What a decoder layer asks of its attention: rows in, rows out, state and pages updated."""

    def forward(self, x: Tensor, step: Step) -> Tensor: ...


class FeedForward(Protocol):
    """What a decoder layer asks of its feed-forward block. The seam for a mixture of experts."""

    def forward(self, x: Tensor) -> Tensor: ...


class DecoderLayer:
    """Pre-norm attention and feed-forward with plain residuals: the one place that Attention Residuals will replace."""

    def __init__(
        self,
        attention_norm: Tensor,
        attention: Attention,
        ffn_norm: Tensor,
        ffn: FeedForward,
        eps: float,
        kernels: Kernels,
    ) -> None:
        self.attention_norm, self.attention, self.ffn_norm, self.ffn = attention_norm, attention, ffn_norm, ffn
        self.eps, self.kernels = eps, kernels

    def forward(self, x: Tensor, delta: Tensor | None, step: Step) -> tuple[Tensor, Tensor]:
        """Residual rows [R, hidden], and what the block before this one adds to them; likewise for the next.

        The sum waits for the next norm, so that one kernel may do both.
        """
        x, normed = self.kernels.add_norm(x, delta, self.attention_norm, self.eps)
        x, normed = self.kernels.add_norm(x, self.attention.forward(normed, step), self.ffn_norm, self.eps)
        return x, self.ffn.forward(normed)


class HybridDecoder:
    """The model. `state(p)` is a function of the tokens alone: no result depends on the batch or on the cut.

    `weights` maps published tensor names (`model.layers.0.self_attn.q_proj.weight`, ...) to tensors of any float dtype.
    `kernels` compute; by default those that the device has for this model. Slots and pages must be laid out with
    `kernels.dtypes`. Raises ModelConfigError for a config beyond this version, and WeightsError for tensors that do not
    fit it.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        kernels: Kernels | None = None,
    ) -> None:
        config.require_runnable()
        self.config, self.device = config, torch.device(device)
        self.kernels = kernels or choose_kernels(config, self.device)
        table = self.kernels.weights(check_weights(config, weights))
        self.embedding = table["model.embed_tokens.weight"]
        self.head = self.embedding if config.tie_word_embeddings else table["lm_head.weight"]
        self.norm = table["model.norm.weight"]
        self.layers = tuple(_build_layer(config, table, layer, self.kernels) for layer in range(config.num_layers))

    @torch.inference_mode()
    def forward(self, batch: RowBatch, tensors: StateTensors) -> Tensor:
        """Consume the batch's rows: [R, hidden], the final-norm row of each.

        Updates each sequence's slot and pages, and stores the final-norm rows of its last two consumed positions.
        Writes only to the batch's slots and to the pages of the rows' positions.
        """
        batch.check(self.config.vocab_size)
        step = self.kernels.step(batch, tensors)
        x, delta = step.embed(self.embedding), None
        for layer in self.layers:
            x, delta = layer.forward(x, delta, step)
        _, rows = self.kernels.add_norm(x, delta, self.norm, self.config.rms_norm_eps)
        return step.finish(rows)

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Logits [B, vocab] fp32 of final-norm rows [B, hidden]."""
        return self.kernels.logits(rows, self.head)


def _build_layer(config: ModelConfig, table: Mapping[str, Tensor], layer: int, kernels: Kernels) -> DecoderLayer:
    prefix = f"model.layers.{layer}."

    def inside(block: str) -> dict[str, Tensor]:
        start = prefix + block
        return {name[len(start) :]: tensor for name, tensor in table.items() if name.startswith(start)}

    attention: Attention
    if config.layer_kinds[layer] == "kda":
        attention = KdaAttention(config, inside("self_attn."), config.kda_layers.index(layer), kernels)
    else:
        attention = MlaAttention(config, inside("self_attn."), config.mla_layers.index(layer), kernels)
    return DecoderLayer(
        table[prefix + "input_layernorm.weight"],
        attention,
        table[prefix + "post_attention_layernorm.weight"],
        SwigluFfn(inside("mlp."), kernels),
        config.rms_norm_eps,
        kernels,
    )
