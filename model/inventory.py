"""The tensors of a model: published names and shapes."""

from collections.abc import Sequence
from typing import Final

from forkpoint.kernels.experts.format import GROUP
from forkpoint.model.config import CONV_TAPS, ModelConfig
from forkpoint.model.moe_config import MoeConfig

PACKED_SUFFIX: Final = ".weight_packed"
"""A matrix whose name ends so is MXFP4, two elements a byte."""
SCALE_SUFFIX: Final = ".weight_scale"
QUANTISED_SUFFIXES: Final = (PACKED_SUFFIX, SCALE_SUFFIX)


def kept_dtype(name: str, shape: Sequence[int]) -> str:
    """What the kernels of a GPU keep a tensor as (PartSpec's spelling): matrices in bf16, as published; vectors and
    conv taps, which are small and scale whole rows, in fp32; MXFP4 as it is."""
    if name.endswith(QUANTISED_SUFFIXES):
        return "uint8"
    return "float32" if len(shape) == 1 or name.endswith("_conv1d.weight") else "bfloat16"


def expected_tensors(config: ModelConfig, packed: bool = False) -> dict[str, tuple[int, ...]]:
    """Published name and canonical shape of every tensor of a model; `packed`: its routed experts are MXFP4.

    Whether they are is decided by the tensors that a folder has, not by its config: the published ignore list of the
    quantisation does not name every matrix that is stored as it is.
    """
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer, kind in enumerate(config.layer_kinds):
        prefix = f"model.layers.{layer}."
        attention = _kda_tensors(config) if kind == "kda" else _mla_tensors(config)
        shapes |= {f"{prefix}self_attn.{name}": shape for name, shape in attention.items()}
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        if config.attn_res_block_size is not None:
            shapes |= _mix_tensors(prefix + "self_attention_res", hidden) | _mix_tensors(prefix + "mlp_res", hidden)
        if config.moe is not None and config.moe.has(layer):
            experts = _moe_tensors(hidden, config.moe, packed)
            shapes |= {f"{prefix}block_sparse_moe.{name}": shape for name, shape in experts.items()}
        else:
            shapes |= _glu_tensors(prefix + "mlp.", hidden, config.intermediate_size)
    if config.attn_res_block_size is not None:
        shapes |= _mix_tensors("model.output_attn_res", hidden)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def _kda_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads, key = config.hidden_size, config.kda_heads, config.kda_key_dim
    keys, values = heads * key, heads * config.kda_value_dim
    shapes: dict[str, tuple[int, ...]] = {}
    for name, width in (("q", keys), ("k", keys), ("v", values)):
        shapes[f"{name}_proj.weight"] = (width, hidden)
        shapes[f"{name}_conv1d.weight"] = (width, CONV_TAPS)
    shapes |= {"f_a_proj.weight": (key, hidden), "f_b_proj.weight": (keys, key), "b_proj.weight": (heads, hidden)}
    shapes |= {"A_log": (heads,), "dt_bias": (keys,)}
    if config.full_rank_gate:
        shapes["g_proj.weight"] = (values, hidden)
    else:
        shapes |= {"g_a_proj.weight": (key, hidden), "g_b_proj.weight": (values, key)}
    return shapes | {"o_norm.weight": (config.kda_value_dim,), "o_proj.weight": (hidden, values)}


def _mla_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank = config.hidden_size, config.mla_heads, config.kv_lora_rank
    queries = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    values = heads * config.v_head_dim
    shapes: dict[str, tuple[int, ...]] = {}
    if config.q_lora_rank is None:
        shapes["q_proj.weight"] = (queries, hidden)
    else:
        shapes["q_a_proj.weight"] = (config.q_lora_rank, hidden)
        shapes["q_a_layernorm.weight"] = (config.q_lora_rank,)
        shapes["q_b_proj.weight"] = (queries, config.q_lora_rank)
    shapes["kv_a_proj_with_mqa.weight"] = (config.latent_dim, hidden)
    shapes["kv_a_layernorm.weight"] = (rank,)
    shapes["kv_b_proj.weight"] = (heads * (config.qk_nope_head_dim + config.v_head_dim), rank)
    if config.mla_output_gate:
        shapes["g_proj.weight"] = (values, hidden)
    return shapes | {"o_proj.weight": (hidden, values)}


def _glu_tensors(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (inner, hidden),
        prefix + "up_proj.weight": (inner, hidden),
        prefix + "down_proj.weight": (hidden, inner),
    }


def _mix_tensors(prefix: str, hidden: int) -> dict[str, tuple[int, ...]]:
    return {prefix + "_norm.weight": (hidden,), prefix + "_proj.weight": (1, hidden)}


def _moe_tensors(hidden: int, moe: MoeConfig, packed: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"gate.weight": (moe.experts, hidden)}
    shapes["gate.e_score_correction_bias"] = (moe.experts,)
    width = hidden
    if moe.latent_size is not None:
        width = moe.latent_size
        shapes["routed_expert_down_proj.weight"] = (width, hidden)
        shapes["routed_expert_up_proj.weight"] = (hidden, width)
        if moe.latent_norm:
            shapes["routed_expert_norm.weight"] = (width,)
    shapes |= _glu_tensors("shared_experts.", hidden, moe.shared_experts * moe.intermediate_size)
    inner = moe.intermediate_size
    for expert in range(moe.experts):
        for name, outputs, inputs in (("w1", inner, width), ("w3", inner, width), ("w2", width, inner)):
            matrix = f"experts.{expert}.{name}"
            if packed:
                shapes[matrix + PACKED_SUFFIX] = (outputs, inputs // 2)
                shapes[matrix + SCALE_SUFFIX] = (outputs, inputs // GROUP)
            else:
                shapes[matrix + ".weight"] = (outputs, inputs)
    return shapes
