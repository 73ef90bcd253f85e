"""What a config may ask for that this version does not compute. Nothing that changes a model is silently ignored."""

from dataclasses import dataclass
from typing import Final

from forkpoint.model.config_fields import ConfigFields

CONV_TAPS: Final = 4
"""Both published models convolve over four inputs; the state layout and the conv kernel rely on it."""
_LINEAR_KEYS: Final = frozenset(
    {
        "head_dim",
        "value_head_dim",
        "num_heads",
        "kda_layers",
        "full_attn_layers",
        "short_conv_kernel_size",
        "use_full_rank_gate",
        "gate_lower_bound",
    }
)
_COMPUTED_KEYS: Final = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "mla_use_nope",
        "mla_use_output_gate",
        "hidden_act",
        "rms_norm_eps",
        "tie_word_embeddings",
        "model_max_length",
        "max_position_embeddings",
        "eos_token_id",
        "linear_attn_config",
        "attn_res_block_size",
        "quantization_config",
        "rope_scaling",
        "attention_bias",
        "num_nextn_predict_layers",
        "vision_config",
    }
)
"""Fields that are read below, or refused unless they have the one value that this version computes."""
_NEUTRAL_KEYS: Final = frozenset(
    {
        # What a file says about itself, and training.
        *("architectures", "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version", "_name_or_path"),
        *("use_cache", "initializer_range", "attention_dropout", "pretraining_tp", "bos_token_id", "pad_token_id"),
        *("keys_to_ignore_at_inference", "_attn_implementation", "return_dict", "output_router_logits"),
        # Without a rotation these say nothing.
        *("head_dim", "rope_theta"),
        # Of the experts, which `num_experts` decides about.
        *("num_experts", "first_k_dense_replace", "moe_layer_freq", "moe_intermediate_size", "num_shared_experts"),
        *("num_experts_per_token", "moe_renormalize", "moe_router_activation_func", "routed_scaling_factor"),
        *("num_expert_group", "topk_group", "use_grouped_topk", "topk_method", "routed_expert_hidden_size"),
        *("latent_moe_use_norm",),
    }
)
"""Published fields that change nothing here. A field in neither list may change the model, so it is refused."""


@dataclass(frozen=True, slots=True)
class UnsupportedFeature:
    """A part of the architecture that this version knows of but does not compute: the config `field` and what it is."""

    field: str
    what: str


def unsupported_features(
    outer: ConfigFields, fields: ConfigFields, linear: ConfigFields
) -> tuple[UnsupportedFeature, ...]:
    """What this version does not compute of a config: `fields` is the text model's object (`outer`, or nested in it)
    and `linear` its `linear_attn_config`."""
    return (*_experts(fields), *_others(outer, fields, linear), *_unknown(fields, linear))


def _experts(fields: ConfigFields) -> list[UnsupportedFeature]:
    """The mixture of experts, if any layer has one: layer l does iff l >= first_k_dense_replace and l % moe_layer_freq
    == 0."""
    experts, layers = fields.raw.get("num_experts"), fields.integer("num_hidden_layers")
    first = 0 if fields.raw.get("first_k_dense_replace") == 0 else fields.integer("first_k_dense_replace", 1)
    every = fields.integer("moe_layer_freq", 1)
    if not experts or not any(layer >= first and layer % every == 0 for layer in range(layers)):
        return []
    return [UnsupportedFeature("num_experts", f"a mixture of {experts} experts")]


def _others(outer: ConfigFields, fields: ConfigFields, linear: ConfigFields) -> list[UnsupportedFeature]:
    """What else the config asks for and this version does not compute."""
    raw, stops = fields.raw, fields.raw.get("eos_token_id")
    asked = {
        "attn_res_block_size": (raw.get("attn_res_block_size") is not None, "Attention Residuals"),
        "quantization_config": (raw.get("quantization_config") is not None, "quantised weights (MXFP4)"),
        "hidden_act": (raw.get("hidden_act", "silu") != "silu", f"the activation {raw.get('hidden_act')!r}"),
        "mla_use_nope": (raw.get("mla_use_nope") is False, "rotary position encoding"),
        "rope_scaling": (raw.get("rope_scaling") is not None, "rotary position encoding"),
        "attention_bias": (bool(raw.get("attention_bias")), "a bias in the attention projections"),
        "num_nextn_predict_layers": (bool(raw.get("num_nextn_predict_layers")), "multi-token prediction"),
        "vision_config": (outer.raw.get("vision_config") is not None, "image input"),
        "eos_token_id": (isinstance(stops, list) and len(stops) > 1, "more than one end-of-sequence token"),
        "num_key_value_heads": (
            raw.get("num_key_value_heads") not in (None, raw.get("num_attention_heads")),
            "a number of key-value heads other than num_attention_heads",
        ),
        "linear_attn_config.short_conv_kernel_size": (
            linear.integer("short_conv_kernel_size", CONV_TAPS) != CONV_TAPS,
            f"a short convolution of other than {CONV_TAPS} taps",
        ),
    }
    return [UnsupportedFeature(key, what) for key, (is_asked, what) in asked.items() if is_asked]


def _unknown(fields: ConfigFields, linear: ConfigFields) -> list[UnsupportedFeature]:
    """Fields that this version has never heard of."""
    unknown = sorted(set(fields.raw) - _COMPUTED_KEYS - _NEUTRAL_KEYS)
    unknown += [f"linear_attn_config.{key}" for key in sorted(set(linear.raw) - _LINEAR_KEYS)]
    return [UnsupportedFeature(key, "this field, which is unknown here and may change the model,") for key in unknown]
