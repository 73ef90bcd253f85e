"""What a config may ask for that this version does not compute. Nothing that changes a model is silently ignored."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from forkpoint.kernels.experts.format import GROUP
from forkpoint.kernels.ffn.activation import ACTIVATIONS
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
        "num_experts",
        "num_experts_per_token",
        "num_shared_experts",
        "first_k_dense_replace",
        "moe_layer_freq",
        "moe_intermediate_size",
        "moe_renormalize",
        "moe_router_activation_func",
        "routed_scaling_factor",
        "routed_expert_hidden_size",
        "latent_moe_use_norm",
        "router_weight_uses_score_correction_bias",
        "num_expert_group",
        "topk_group",
        "activation_situ_beta",
        "activation_situ_linear_beta",
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
        # Which experts may be chosen: with one group, all.
        *("use_grouped_topk", "topk_method"),
        # Defaults of transformers that its `to_dict` writes and that say nothing about the architecture.
        *("add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward"),
        *("cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping"),
        *("encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "finetuning_task"),
        *("forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder", "label2id"),
        *("length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams"),
        *("num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "prefix"),
        *("problem_type", "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate"),
        *("sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss"),
        *("tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torchscript", "typical_p", "use_bfloat16"),
    }
)
"""Published fields that change nothing here. A field in neither list may change the model, so it is refused."""
_WRAPPER_KEYS: Final = frozenset(
    {
        *("text_config", "tie_word_embeddings", "quantization_config", "eos_token_id"),
        # What is seen enters the text model as rows that nobody makes here.
        *("vision_config", "image_placeholder", "media_placeholder_token_id", "ignore_index"),
    }
)
"""Fields of a multimodal model beside its text model."""
_MXFP4_FORMAT: Final = "mxfp4-pack-quantized"
_QUANTISED: Final = "a quantisation other than MXFP4"


@dataclass(frozen=True, slots=True)
class UnsupportedFeature:
    """A part of the architecture that this version knows of but does not compute: the config `field` and what it is."""

    field: str
    what: str


def unsupported_features(
    fields: ConfigFields, linear: ConfigFields, outer: ConfigFields | None
) -> tuple[UnsupportedFeature, ...]:
    """What this version does not compute of a config: `fields` is the text model's object, `linear` its
    `linear_attn_config`, and `outer` the object around it, if the text model is nested in a multimodal one."""
    asked = [*_known(fields), *_of_linear(linear), *_unknown(fields, _COMPUTED_KEYS | _NEUTRAL_KEYS)]
    if outer is not None:
        asked += [*_of_wrapper(outer, fields), *_unknown(outer, _WRAPPER_KEYS | _NEUTRAL_KEYS)]
    return tuple(asked)


def _known(fields: ConfigFields) -> list[UnsupportedFeature]:
    """Fields of the text model that are known, with a value that is not computed."""
    raw, groups = fields.raw, fields.raw.get("num_expert_group")
    asked = {
        "quantization_config": (not _is_mxfp4(raw.get("quantization_config")), _QUANTISED),
        "hidden_act": (
            raw.get("hidden_act", "silu") not in ACTIVATIONS,
            f"the activation {raw.get('hidden_act')!r}",
        ),
        "moe_router_activation_func": (
            raw.get("moe_router_activation_func", "sigmoid") != "sigmoid",
            f"a router with {raw.get('moe_router_activation_func')!r}",
        ),
        "num_expert_group": (groups not in (None, 1, raw.get("topk_group")), "groups of experts"),
        "mla_use_nope": (raw.get("mla_use_nope") is False, "rotary position encoding"),
        "rope_scaling": (raw.get("rope_scaling") is not None, "rotary position encoding"),
        "attention_bias": (bool(raw.get("attention_bias")), "a bias in the attention projections"),
        "num_nextn_predict_layers": (bool(raw.get("num_nextn_predict_layers")), "multi-token prediction"),
        "num_key_value_heads": (
            raw.get("num_key_value_heads") not in (None, raw.get("num_attention_heads")),
            "a number of key-value heads other than num_attention_heads",
        ),
    }
    return _asked(fields, asked)


def _of_linear(linear: ConfigFields) -> list[UnsupportedFeature]:
    taps = linear.integer("short_conv_kernel_size", CONV_TAPS)
    asked = {"short_conv_kernel_size": (taps != CONV_TAPS, f"a short convolution of other than {CONV_TAPS} taps")}
    return _asked(linear, asked) + _unknown(linear, _LINEAR_KEYS)


def _of_wrapper(outer: ConfigFields, fields: ConfigFields) -> list[UnsupportedFeature]:
    tied = outer.flag("tie_word_embeddings") and not fields.flag("tie_word_embeddings")
    asked = {
        "quantization_config": (not _is_mxfp4(outer.raw.get("quantization_config")), _QUANTISED),
        "tie_word_embeddings": (tied, "an embedding that is tied in the outer model only"),
    }
    return _asked(outer, asked)


def _asked(fields: ConfigFields, asked: Mapping[str, tuple[bool, str]]) -> list[UnsupportedFeature]:
    return [UnsupportedFeature(fields.prefix + key, what) for key, (is_asked, what) in asked.items() if is_asked]


def _is_mxfp4(quantization: object) -> bool:
    """Whether a `quantization_config` is absent or the published one: 4-bit floats in groups of 32 with byte scales,
    weights only."""
    if quantization is None:
        return True
    if not isinstance(quantization, dict) or quantization.get("format") != _MXFP4_FORMAT:
        return False
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups or quantization.get("kv_cache_scheme") is not None:
        return False
    return all(isinstance(group, dict) and _is_mxfp4_group(group) for group in groups.values())


def _is_mxfp4_group(group: Mapping[str, Any]) -> bool:
    weights = group.get("weights")
    if not isinstance(weights, dict) or group.get("format", _MXFP4_FORMAT) != _MXFP4_FORMAT:
        return False
    if group.get("input_activations") is not None or group.get("output_activations") is not None:
        return False
    exact = {"num_bits": 4, "type": "float", "group_size": GROUP, "symmetric": True, "scale_dtype": "torch.uint8"}
    return all(weights.get(key, value) == value for key, value in exact.items()) and "num_bits" in weights


def _unknown(fields: ConfigFields, known: frozenset[str]) -> list[UnsupportedFeature]:
    """Fields that this version has never heard of."""
    what = "this field, which is unknown here and may change the model,"
    return [UnsupportedFeature(fields.prefix + key, what) for key in sorted(set(fields.raw) - known)]
