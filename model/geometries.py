"""Geometries of the published models: fields of their configs, no weights. `plan` and `model` take them by name."""

from collections.abc import Callable, Mapping
from typing import Any, Final

from forkpoint.model.config import ModelConfig, ModelConfigError


def _layer_lists(layers: int, full_attention: list[int]) -> dict[str, list[int]]:
    rest = [number for number in range(1, layers + 1) if number not in set(full_attention)]
    return {"kda_layers": rest, "full_attn_layers": full_attention}


WRAPPERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "k3": {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3"}
}
"""Models whose published config.json has the geometry nested in a `text_config`, and what is beside it."""
_SPECIAL: Final = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}


def kimi_linear() -> dict[str, Any]:
    """Kimi Linear 48B-A3B: 27 layers, 20 KDA with the unbounded gate and 7 MLA."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": 163840,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 27,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 2.446,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "model_max_length": 1048576,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        **_SPECIAL,
        "linear_attn_config": {
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
            **_layer_lists(27, [4, 8, 12, 16, 20, 24, 27]),
        },
    }


def kimi_k3() -> dict[str, Any]:
    """Kimi K3's text model: 93 layers, 69 KDA with the bounded gate and 24 MLA (the last two layers are both MLA)."""
    return {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": 163840,
        "hidden_size": 7168,
        "intermediate_size": 33792,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": 12,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "moe_renormalize": True,
        "moe_router_activation_func": "sigmoid",
        "routed_scaling_factor": 1.0,
        "num_expert_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 32}}},
        },
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        **_SPECIAL,
        "linear_attn_config": {
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            **_layer_lists(93, [*range(4, 93, 4), 93]),
        },
    }


GEOMETRIES: Final[Mapping[str, Callable[[], dict[str, Any]]]] = {"k3": kimi_k3, "kimi-linear": kimi_linear}


def geometry(name: str) -> ModelConfig:
    """The config of a published model by its short name; raises ModelConfigError for another name."""
    if name not in GEOMETRIES:
        raise ModelConfigError("model", "geometry", f"{name!r} is not one of {sorted(GEOMETRIES)}")
    return ModelConfig.from_dict(GEOMETRIES[name](), source=name)
