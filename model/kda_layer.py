"""KdaAttention: one Kimi Delta Attention layer over packed rows."""

from collections.abc import Mapping

import torch
from torch import Tensor

from forkpoint.kernels.conv.naive import causal_conv
from forkpoint.kernels.elementwise import sigmoid
from forkpoint.kernels.kda.naive import kda_gate, tile_kda
from forkpoint.kernels.matmul.naive import linear
from forkpoint.kernels.norm.naive import gated_rms_norm, l2_norm
from forkpoint.model.config import ModelConfig
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import StateTensors


class KdaAttention:
    """q, k, v projections, short conv, L2 norm, decay gate, beta, the tile-form delta rule, gated norm, output.

    `weights` holds the layer's tensors under their published names after `self_attn.`, in the compute dtype;
    `ordinal` numbers the layer among the KDA layers. Source: Kimi Linear (arXiv 2510.26692), section 3.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], ordinal: int) -> None:
        heads, key, value = config.kda_heads, config.kda_key_dim, config.kda_value_dim
        self.ordinal, self.heads, self.key, self.value = ordinal, heads, key, value
        self.eps, self.lower_bound, self.scale = config.rms_norm_eps, config.gate_lower_bound, key**-0.5
        # One product for everything that reads the layer's input; its width is fixed, so its bits are too.
        gate_name = "g_proj.weight" if config.full_rank_gate else "g_a_proj.weight"
        inputs = [weights[name] for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "f_a_proj.weight")]
        inputs += [weights[gate_name], weights["b_proj.weight"]]
        self.widths = [config.conv_channels, key, weights[gate_name].shape[0], heads]
        self.input_weight = torch.cat(inputs)
        self.conv_weight = torch.cat([weights[f"{name}_conv1d.weight"] for name in "qkv"])
        self.decay_weight = weights["f_b_proj.weight"]
        self.A_log, self.dt_bias = weights["A_log"], weights["dt_bias"].view(heads, key)
        self.gate_weight = None if config.full_rank_gate else weights["g_b_proj.weight"]
        self.norm_weight = weights["o_norm.weight"]
        self.output_weight = weights["o_proj.weight"]

    def forward(self, x: Tensor, batch: RowBatch, tensors: StateTensors) -> Tensor:
        """Rows [R, hidden] (normed) to rows [R, hidden]; consumes them into the slots' state."""
        rows, heads, layer = x.shape[0], self.heads, self.ordinal
        projected = torch.split_with_sizes(linear(x, self.input_weight), self.widths, dim=1)
        conv_input, decay_low, gate, beta_logits = projected
        mixed = causal_conv(
            conv_input,
            self.conv_weight,
            tensors.conv_ring[layer],
            tensors.conv_grid[layer],
            batch.slots,
            batch.cu_seqlens,
            batch.starts,
        )
        keys = heads * self.key
        query_key = l2_norm(mixed[:, : 2 * keys].reshape(rows, 2 * heads, self.key))
        log_decay = linear(decay_low.contiguous(), self.decay_weight).view(rows, heads, self.key)
        if self.gate_weight is not None:
            gate = linear(gate.contiguous(), self.gate_weight)
        out = tile_kda(
            query_key[:, :heads] * self.scale,
            query_key[:, heads:],
            mixed[:, 2 * keys :].reshape(rows, heads, self.value),
            kda_gate(log_decay, self.A_log, self.dt_bias, self.lower_bound),
            sigmoid(beta_logits),
            tensors.S[layer],
            tensors.open_rows[layer],
            batch.slots,
            batch.cu_seqlens,
            batch.starts,
            self.lower_bound,
        )
        normed = gated_rms_norm(out, gate.reshape(rows, heads, self.value), self.norm_weight, self.eps)
        return linear(normed.reshape(rows, heads * self.value), self.output_weight)
