"""MlaAttention: one multi-head latent attention layer (NoPE) in the absorbed form, over packed rows and pages."""

import torch
from torch import Tensor

from forkpoint.model.config import MLA_INNER_NORM_EPS, ModelConfig
from forkpoint.model.kernels import Kernels, Step
from forkpoint.model.table import WeightTable


class MlaAttention:
    """Latent and raw key into the pages, then absorbed attention: one key-value head of width r + dr, value = first r.

    `weights` holds the layer's tensors under their published names after `self_attn.`, as `kernels` keeps them;
    `ordinal` numbers the layer among the MLA layers. No rotation is applied to the "rope" dimensions of either model.
    """

    def __init__(self, config: ModelConfig, weights: WeightTable, ordinal: int, kernels: Kernels) -> None:
        heads, nope, rope, value = config.mla_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.kernels, self.ordinal, self.heads, self.nope, self.rope = kernels, ordinal, heads, nope, rope
        self.rank, self.scale = config.kv_lora_rank, (nope + rope) ** -0.5
        query_name = "q_proj.weight" if config.q_lora_rank is None else "q_a_proj.weight"
        inputs = [weights["kv_a_proj_with_mqa.weight"], weights[query_name]]
        if config.mla_output_gate:
            inputs.append(weights["g_proj.weight"])
        self.widths = [weight.shape[0] for weight in inputs]
        self.input_weight = torch.cat(inputs)
        self.latent_norm = weights["kv_a_layernorm.weight"]
        self.query_norm = None if config.q_lora_rank is None else weights["q_a_layernorm.weight"]
        self.query_weight = None if config.q_lora_rank is None else weights["q_b_proj.weight"]
        expand = weights["kv_b_proj.weight"].view(heads, nope + value, self.rank)
        self.key_expand = kernels.per_head_weight(expand[:, :nope])  # [H, dn, r]
        self.value_expand = kernels.per_head_weight(expand[:, nope:].transpose(1, 2))  # [H, r, dv]
        self.output_weight = weights["o_proj.weight"]

    def forward(self, x: Tensor, step: Step) -> Tensor:
        """Rows [R, hidden] (normed) to rows [R, hidden]; writes their latents to the pages before attending."""
        kernels = self.kernels
        compressed, query, *gate = torch.split_with_sizes(kernels.linear(x, self.input_weight), self.widths, dim=1)
        latent = kernels.rms_norm(compressed[:, : self.rank], self.latent_norm, MLA_INNER_NORM_EPS)
        latents = torch.cat([latent, compressed[:, self.rank :]], dim=1)
        if self.query_weight is not None and self.query_norm is not None:
            query = kernels.linear(kernels.rms_norm(query, self.query_norm, MLA_INNER_NORM_EPS), self.query_weight)
        query = query.reshape(x.shape[0], self.heads, self.nope + self.rope)
        absorbed = torch.cat(
            [kernels.per_head(query[..., : self.nope], self.key_expand), query[..., self.nope :]], dim=2
        )
        attended = step.attend(absorbed, latents, self.rank, self.scale, self.ordinal)
        out = kernels.per_head(attended, self.value_expand).flatten(1)
        if gate:
            out = kernels.gated(out, gate[0])
        return kernels.linear(out, self.output_weight)
