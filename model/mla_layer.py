"""MlaAttention: one multi-head latent attention layer (NoPE) in the absorbed form, over packed rows and pages."""

from collections.abc import Mapping

import torch
from torch import Tensor

from forkpoint.kernels.elementwise import sigmoid
from forkpoint.kernels.matmul.naive import BLOCK_ROWS, bmm_fixed, linear
from forkpoint.kernels.mla.naive import paged_mla, write_latents
from forkpoint.kernels.norm.naive import rms_norm
from forkpoint.model.config import MLA_INNER_NORM_EPS, ModelConfig
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import StateTensors


def per_head_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [R, H, A] times weight [H, A, B] head by head: [R, H, B].

    In blocks of 16 rows, the last one padded with zeros, so that a row's bits do not depend on how many rows there are.
    """
    rows, heads, width = x.shape
    if rows == 0:
        return x.new_empty(0, heads, weight.shape[2])
    blocks = -(-rows // BLOCK_ROWS)
    padded = x.new_zeros(heads, blocks * BLOCK_ROWS, width)
    padded[:, :rows] = x.transpose(0, 1)
    # The same items either way, so the same bits: fewer calls by block when decoding, by head when prefilling.
    if blocks <= heads:
        products = [bmm_fixed(padded[:, i * BLOCK_ROWS : (i + 1) * BLOCK_ROWS], weight) for i in range(blocks)]
        out = torch.cat(products, dim=1)
    else:
        rows_of = padded.view(heads, blocks, BLOCK_ROWS, width)
        products = [bmm_fixed(rows_of[h], weight[h].expand(blocks, -1, -1)) for h in range(heads)]
        out = torch.stack(products).view(heads, blocks * BLOCK_ROWS, -1)
    return out[:, :rows].transpose(0, 1)


class MlaAttention:
    """Latent and raw key into the pages, then absorbed attention: one key-value head of width r + dr, value = first r.

    `weights` holds the layer's tensors under their published names after `self_attn.`; `ordinal` numbers the layer
    among the MLA layers. No rotation is applied to the "rope" dimensions of either model.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, Tensor], ordinal: int) -> None:
        heads, nope, rope, value = config.mla_heads, config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        self.ordinal, self.heads, self.nope, self.rope = ordinal, heads, nope, rope
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
        self.key_expand = expand[:, :nope].contiguous()  # [H, dn, r]
        self.value_expand = expand[:, nope:].transpose(1, 2).contiguous()  # [H, r, dv]
        self.output_weight = weights["o_proj.weight"]

    def forward(self, x: Tensor, batch: RowBatch, tensors: StateTensors) -> Tensor:
        """Rows [R, hidden] (normed) to rows [R, hidden]; writes their latents to the pages before attending."""
        rows, pages = x.shape[0], tensors.layer_pages[self.ordinal]
        compressed, query, *gate = torch.split_with_sizes(linear(x, self.input_weight), self.widths, dim=1)
        latent = rms_norm(compressed[:, : self.rank].contiguous(), self.latent_norm, MLA_INNER_NORM_EPS)
        latents = torch.cat([latent, compressed[:, self.rank :]], dim=1)
        write_latents(latents, pages, batch.page_tables, batch.cu_seqlens, batch.starts)
        if self.query_weight is not None and self.query_norm is not None:
            query = linear(rms_norm(query.contiguous(), self.query_norm, MLA_INNER_NORM_EPS), self.query_weight)
        query = query.reshape(rows, self.heads, self.nope + self.rope)
        absorbed = torch.cat(
            [per_head_product(query[..., : self.nope], self.key_expand), query[..., self.nope :]], dim=2
        )
        attended = paged_mla(absorbed, pages, batch.page_tables, self.rank, self.scale, batch.cu_seqlens, batch.starts)
        out = per_head_product(attended, self.value_expand).flatten(1)
        if gate:
            out = out * sigmoid(gate[0])
        return linear(out, self.output_weight)
