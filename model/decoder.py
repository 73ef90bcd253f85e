"""HybridDecoder: KDA and MLA layers over packed rows, from token ids to final-norm rows and logits."""

import logging
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.model.ffn import GluFfn
from forkpoint.model.inventory import PACKED_SUFFIX
from forkpoint.model.kda_layer import KdaAttention
from forkpoint.model.kernels import Kernels, choose_kernels
from forkpoint.model.mla_layer import MlaAttention
from forkpoint.model.moe import SparseMoe
from forkpoint.model.residual import BlockNorm, MixedStream, PlainStream, Stream, mix_weight
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import StateTensors
from forkpoint.model.step import Step
from forkpoint.model.table import WeightTable
from forkpoint.model.weights import check_weights

log = logging.getLogger(__name__)


class Attention(Protocol):
    """What a decoder layer asks of its attention: rows in, rows out, state and pages updated."""

    def forward(self, x: Tensor, step: Step) -> Tensor: ...


class FeedForward(Protocol):
    """What a decoder layer asks of its feed-forward block. Dense, or a mixture of experts."""

    def forward(self, x: Tensor) -> Tensor: ...


class DecoderLayer:
    """Attention and feed-forward, each of the stream's normed rows, each added to the stream.

    `opens_block`: the layer begins a block of Attention Residuals.
    """

    def __init__(
        self,
        attention_norm: BlockNorm,
        attention: Attention,
        ffn_norm: BlockNorm,
        ffn: FeedForward,
        eps: float,
        opens_block: bool,
    ) -> None:
        self.attention_norm, self.attention, self.ffn_norm, self.ffn = attention_norm, attention, ffn_norm, ffn
        self.eps, self.opens_block = eps, opens_block

    def forward(self, stream: Stream, step: Step) -> None:
        """Moves the stream on by one layer."""
        rows = stream.read(self.attention_norm, self.eps)
        if self.opens_block:
            stream.open_block()
        stream.add(self.attention.forward(rows, step))
        stream.add(self.ffn.forward(stream.read(self.ffn_norm, self.eps)))


class HybridDecoder:
    """The model. `state(p)` is a function of the tokens alone: no result depends on the batch or on the cut.

    `weights` maps published tensor names (`model.layers.0.self_attn.q_proj.weight`, ...) to tensors of any float dtype.
    All are checked before the first is read; each is read once, layer by layer. `source` names them in errors.
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
        source: str = "weights",
    ) -> None:
        config.require_runnable()
        read = check_weights(config, weights, source)
        for note in read.notes:
            log.info("%s: %s", source, note)
        self.config, self.device = config, torch.device(device)
        self.kernels = kernels = kernels or choose_kernels(config, self.device)
        packed = any(name.endswith(PACKED_SUFFIX) for name in read)
        table = WeightTable(lambda name: kernels.weight(name, read[name]))
        self.embedding = table["model.embed_tokens.weight"]
        self.layers = tuple(_build_layer(config, table, layer, packed, kernels) for layer in range(config.num_layers))
        mixed = config.attn_res_block_size is not None
        mix = mix_weight(table, "model.output_attn_res") if mixed else None
        self.norm = BlockNorm(table["model.norm.weight"], mix)
        self.head = self.embedding if config.tie_word_embeddings else table["lm_head.weight"]
        self.replay = True
        """Steps may be recorded and replayed (`Kernels.run`): no result depends on it."""

    @torch.inference_mode()
    def forward(self, batch: RowBatch, tensors: StateTensors) -> Tensor:
        """Consume the batch's rows: [R, hidden], the final-norm row of each.

        Updates each sequence's slot and pages, and stores the final-norm rows of its last two consumed positions.
        Writes only to the batch's slots and to the pages of the rows' positions.
        """
        batch.check(self.config.vocab_size)
        return self.kernels.run(batch, tensors, self._run_layers, self.replay)

    def _run_layers(self, step: Step) -> Tensor:
        stream = self._stream(step.embed(self.embedding))
        for layer in self.layers:
            layer.forward(stream, step)
        return step.finish(stream.read(self.norm, self.config.rms_norm_eps))

    def _stream(self, x: Tensor) -> Stream:
        if self.config.attn_res_block_size is None:
            return PlainStream(x, self.kernels)
        return MixedStream(x, sum(layer.opens_block for layer in self.layers), self.kernels)

    @torch.inference_mode()
    def logits(self, rows: Tensor) -> Tensor:
        """Logits [B, vocab] fp32 of final-norm rows [B, hidden]."""
        return self.kernels.logits(rows, self.head)


def _build_layer(config: ModelConfig, table: WeightTable, layer: int, packed: bool, kernels: Kernels) -> DecoderLayer:
    inside = table.inside(f"model.layers.{layer}.")
    block = config.attn_res_block_size
    attention: Attention
    if config.layer_kinds[layer] == "kda":
        attention = KdaAttention(config, inside.inside("self_attn."), config.kda_layers.index(layer), kernels)
    else:
        attention = MlaAttention(config, inside.inside("self_attn."), config.mla_layers.index(layer), kernels)
    ffn: FeedForward
    if config.moe is not None and config.moe.has(layer):
        ffn = SparseMoe(config, config.moe, inside.inside("block_sparse_moe."), packed, kernels)
    else:
        ffn = GluFfn(inside.inside("mlp."), config.activation, kernels)
    return DecoderLayer(
        BlockNorm(inside["input_layernorm.weight"], mix_weight(inside, "self_attention_res") if block else None),
        attention,
        BlockNorm(inside["post_attention_layernorm.weight"], mix_weight(inside, "mlp_res") if block else None),
        ffn,
        config.rms_norm_eps,
        opens_block=block is not None and layer % block == 0,
    )
