"""KdaAttention: one Kimi Delta Attention layer over packed rows."""

import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.model.kernels import KdaWeights, Kernels, Step
from forkpoint.model.table import WeightTable


class KdaAttention:
    """q, k, v projections, short conv, L2 norm, decay gate, beta, the tile-form delta rule, gated norm, output.

    `weights` holds the layer's tensors under their published names after `self_attn.`, as `kernels` keeps them;
    `ordinal` numbers the layer among the KDA layers. Source: Kimi Linear (arXiv 2510.26692), section 3.
    """

    def __init__(self, config: ModelConfig, weights: WeightTable, ordinal: int, kernels: Kernels) -> None:
        heads, key = config.kda_heads, config.kda_key_dim
        self.kernels, self.ordinal, self.eps = kernels, ordinal, config.rms_norm_eps
        # One product for everything that reads the layer's input; its width is fixed, so its bits are too.
        gate_name = "g_proj.weight" if config.full_rank_gate else "g_a_proj.weight"
        inputs = [weights[name] for name in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "f_a_proj.weight")]
        gate = weights[gate_name]
        inputs += [gate, weights["b_proj.weight"]]
        self.widths = [config.conv_channels, key, gate.shape[0], heads]
        self.input_weight = torch.cat(inputs)
        self.decay_weight = weights["f_b_proj.weight"]
        self.rule = KdaWeights(
            conv=torch.cat([weights[f"{name}_conv1d.weight"] for name in "qkv"]).t().contiguous(),
            A_log=weights["A_log"],
            dt_bias=weights["dt_bias"].view(heads, key),
            lower_bound=config.gate_lower_bound,
        )
        self.gate_weight = None if config.full_rank_gate else weights["g_b_proj.weight"]
        self.norm_weight = weights["o_norm.weight"]
        self.output_weight = weights["o_proj.weight"]

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Rows [R, hidden] (normed) to rows [R, hidden]; consumes them into the slots' state."""
        kernels = self.kernels
        projected = torch.split_with_sizes(kernels.linear(x, self.input_weight), self.widths, dim=1)
        conv_input, decay_low, gate, beta_logits = projected
        decay = kernels.linear(decay_low, self.decay_weight)
        if self.gate_weight is not None:
            gate = kernels.linear(gate, self.gate_weight)
        out = step.kda(conv_input, decay, beta_logits, self.rule, self.ordinal)
        return kernels.linear(kernels.gated_rms_norm(out, gate, self.norm_weight, self.eps), self.output_weight)
