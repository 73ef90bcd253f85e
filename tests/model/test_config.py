"""ModelConfig: published fields are read, and nothing that changes the model is silently ignored."""

import json
from pathlib import Path
from typing import Any

import pytest

from forkpoint.errors import ConfigError
from forkpoint.model.config import ModelConfig, ModelConfigError
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.geometries import geometry
from tests.support.random_model import random_config


def changed(change: dict[str, Any]) -> dict[str, Any]:
    """A good config's fields with some of them changed; `linear.` prefixes those of linear_attn_config."""
    raw = json.loads(json.dumps(dict(random_config("bounded").raw)))
    for key, value in change.items():
        inner, name = (raw["linear_attn_config"], key[7:]) if key.startswith("linear.") else (raw, key)
        inner[name] = value
    return dict(raw)


def test_layer_lists_count_from_one() -> None:
    config = random_config(layers=5, mla_layers=[1, 5])
    assert config.layer_kinds == ("mla", "kda", "kda", "kda", "mla")
    assert config.kda_layers == (1, 2, 3)
    assert config.mla_layers == (0, 4)


def test_a_folder_gives_what_its_fields_give(tmp_path: Path) -> None:
    raw = changed({})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = ModelConfig.from_folder(tmp_path)
    assert config.raw == raw
    assert config.source == str(tmp_path / "config.json")
    assert (config.gate_lower_bound, config.full_rank_gate, config.mla_output_gate) == (-5.0, True, True)
    assert config.conv_channels == 2 * 3 * 16
    assert config.context_limit == 4096


def test_absent_fields_mean_kimi_linear() -> None:
    config = random_config("softplus")
    assert (config.gate_lower_bound, config.full_rank_gate, config.mla_output_gate) == (None, False, False)
    assert config.q_lora_rank is None
    assert config.kda_value_dim == config.kda_key_dim


def test_a_nested_text_config_and_a_list_of_stop_tokens_are_read() -> None:
    raw = changed({"eos_token_id": [7, 2, 7]})
    config = ModelConfig.from_dict({"model_type": "kimi_k3", "text_config": raw})
    assert (config.eos_token_ids, config.unsupported) == ((7, 2), ())
    seeing = ModelConfig.from_dict({"text_config": raw, "vision_config": {}})
    assert [feature.field for feature in seeing.unsupported] == ["vision_config"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_experts": 8, "first_k_dense_replace": 1}, "num_experts"),
        ({"attn_res_block_size": 12}, "attn_res_block_size"),
        ({"quantization_config": {"format": "mxfp4-pack-quantized"}}, "quantization_config"),
        ({"hidden_act": "situ"}, "hidden_act"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"vision_config": {}}, "vision_config"),
        ({"linear.short_conv_kernel_size": 3}, "linear_attn_config.short_conv_kernel_size"),
        ({"linear.allow_neg_eigval": True}, "linear_attn_config.allow_neg_eigval"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"logit_scale": 0.5}, "logit_scale"),
    ],
)
def test_what_is_not_computed_yet_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    config = ModelConfig.from_dict(changed(change), source="config.json")
    with pytest.raises(ModelConfigError, match="not supported by this version") as caught:
        HybridDecoder(config, {})
    assert (caught.value.key, caught.value.source) == (field, "config.json")


def test_experts_beyond_the_last_layer_are_no_experts() -> None:
    config = ModelConfig.from_dict(changed({"num_experts": 8, "first_k_dense_replace": 4}))
    assert config.unsupported == ()


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"eos_token_id": None}, "eos_token_id"),
        ({"eos_token_id": 96}, "eos_token_id"),
        ({"eos_token_id": [2, 96]}, "eos_token_id"),
        ({"eos_token_id": [2, "3"]}, "eos_token_id"),
        ({"eos_token_id": []}, "eos_token_id"),
        ({"linear_attn_config": None}, "linear_attn_config"),
        ({"linear_attn_config": [1]}, "linear_attn_config"),
        ({"linear.kda_layers": [0, 1, 2]}, "linear_attn_config.kda_layers"),
        ({"linear.kda_layers": [1, 2, 3, 4]}, "linear_attn_config.kda_layers"),
        ({"linear.full_attn_layers": ["4"]}, "linear_attn_config.full_attn_layers"),
        ({"linear.gate_lower_bound": -9}, "linear_attn_config.gate_lower_bound"),
        ({"linear.gate_lower_bound": 0}, "linear_attn_config.gate_lower_bound"),
    ],
)
def test_a_bad_field_is_named_with_its_file(change: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_dict(changed(change), source="some/config.json")
    assert (caught.value.key, caught.value.source) == (field, "some/config.json")


@pytest.mark.parametrize("content", [None, "nonsense", "[]", b"\xff"])
def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path, content: str | bytes | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_the_published_geometries_are_known_but_not_runnable() -> None:
    k3, linear = geometry("k3"), geometry("kimi-linear")
    assert (k3.num_layers, len(k3.kda_layers), len(k3.mla_layers)) == (93, 69, 24)
    assert k3.mla_layers[-2:] == (91, 92)
    assert (linear.num_layers, len(linear.kda_layers), len(linear.mla_layers)) == (27, 20, 7)
    assert linear.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert {feature.field for feature in k3.unsupported} == {
        "num_experts",
        "attn_res_block_size",
        "quantization_config",
        "hidden_act",
    }
    assert [feature.field for feature in linear.unsupported] == ["num_experts"]
    with pytest.raises(ModelConfigError, match="kimi-linear"):
        geometry("k4")
