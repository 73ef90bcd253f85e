"""The published models' whole configs: the geometry, and all that their files say besides."""

from typing import Any, Final

from forkpoint.model.geometries import kimi_k3, kimi_linear

_IDS: Final = {"bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839}
_MODEL_CLASSES: Final = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
_DEFAULTS: Final[dict[str, Any]] = {
    **dict.fromkeys(("add_cross_attention", "do_sample", "early_stopping", "is_decoder", "is_encoder_decoder"), False),
    **dict.fromkeys(("output_attentions", "output_hidden_states", "output_scores", "remove_invalid_values"), False),
    **dict.fromkeys(("return_dict_in_generate", "tf_legacy_loss", "tie_encoder_decoder", "torchscript"), False),
    **dict.fromkeys(("bad_words_ids", "begin_suppress_tokens", "cross_attention_hidden_size"), None),
    **dict.fromkeys(("decoder_start_token_id", "exponential_decay_length_penalty", "finetuning_task"), None),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "prefix", "problem_type", "sep_token_id"), None),
    **dict.fromkeys(("suppress_tokens", "task_specific_params", "tokenizer_class"), None),
    **dict.fromkeys(("chunk_size_feed_forward", "encoder_no_repeat_ngram_size", "min_length"), 0),
    **dict.fromkeys(("length_penalty", "repetition_penalty", "temperature", "top_p", "typical_p"), 1.0),
    **dict.fromkeys(("num_beam_groups", "num_beams", "num_return_sequences"), 1),
    "diversity_penalty": 0.0,
    "max_length": 20,
    "no_repeat_ngram_size": 0,
    "top_k": 50,
    "use_bfloat16": False,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"},
    "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "pruned_heads": {},
    "_name_or_path": "",
    "return_dict": True,
    "transformers_version": "4.56.2",
}
"""What transformers 4 writes of a config that says nothing about them."""


def published_linear() -> dict[str, Any]:
    """Kimi Linear's config.json."""
    return kimi_linear() | {
        "architectures": ["KimiLinearForCausalLM"],
        "auto_map": {name: f"code.{name}" for name in _MODEL_CLASSES},
        **_IDS,
        "dtype": "bfloat16",
        "head_dim": 72,
        "initializer_range": 0.02,
        "num_key_value_heads": 32,
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "transformers_version": "4.56.2",
        "use_cache": True,
        "use_grouped_topk": True,
    }


def published_k3() -> dict[str, Any]:
    """Kimi K3's config.json: the text model nested beside the vision model, with all of its quantisation."""
    text = kimi_k3() | _DEFAULTS | _IDS
    text |= {"architectures": ["KimiLinearForCausalLM"], "auto_map": {name: f"code.{name}" for name in _MODEL_CLASSES}}
    text |= {"dtype": "bfloat16", "initializer_range": 0.02, "num_key_value_heads": 96, "num_nextn_predict_layers": 0}
    text |= {"tie_word_embeddings": False, "topk_method": "noaux_tc", "use_cache": True, "use_grouped_topk": True}
    weights: dict[str, Any] = {
        **dict.fromkeys(("actorder", "block_structure", "zp_dtype"), None),
        "dynamic": False,
        "group_size": 32,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "strategy": "group",
        "symmetric": True,
        "type": "float",
    }
    kept = ("self_attn.*", "shared_experts.*", r"mlp\.(gate|up|gate_up|down)_proj.*", "lm_head.*")
    text["quantization_config"] = {
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": weights,
            }
        },
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": [f"re:.*{name}" for name in (*kept, "vision_tower.*", "mm_projector.*")],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "auto_map": {name: f"code.{name}" for name in _MODEL_CLASSES},
        **_IDS,
        "dtype": "bfloat16",
        "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>",
        "media_placeholder_token_id": 163605,
        "model_type": "kimi_k3",
        "text_config": text,
        "tie_word_embeddings": False,
        "vision_config": {"patch_size": 14, "vt_hidden_size": 1024, "vt_num_hidden_layers": 27},
    }
