"""ModelConfig: published fields are read, and nothing that changes the model is silently ignored."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forkpoint.errors import ConfigError
from forkpoint.kernels.ffn.activation import Activation
from forkpoint.model.config import ModelConfig, ModelConfigError
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.geometries import geometry
from forkpoint.model.moe_config import MoeConfig
from tests.support.published_config import published_k3, published_linear
from tests.support.random_model import EXPERTS, random_config


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
    config = ModelConfig.from_dict({"model_type": "kimi_k3", "text_config": raw, "vision_config": {"patch_size": 14}})
    assert (config.eos_token_ids, config.unsupported) == ((7, 2), ())
    around = ModelConfig.from_dict({"model_type": "kimi_k3", "text_config": raw, "eos_token_id": [2, 5]})
    assert around.eos_token_ids == (7, 2, 5)
    del raw["eos_token_id"]
    assert ModelConfig.from_dict({"text_config": raw, "eos_token_id": 5}).eos_token_ids == (5,)


def test_the_whole_published_config_of_k3_is_read() -> None:
    config = ModelConfig.from_dict(published_k3())
    assert config.unsupported == ()
    assert config == replace(geometry("k3"), source="config")
    assert config.raw == published_k3()
    assert config.moe == MoeConfig(
        experts=896,
        per_token=16,
        shared_experts=2,
        intermediate_size=3072,
        latent_size=3584,
        latent_norm=True,
        scaling_factor=1.0,
        renormalize=True,
        biased_weights=False,
        first_layer=1,
        every=1,
    )
    assert config.activation == Activation("situ", 4.0, 25.0)
    assert config.attn_res_block_size == 12


def test_the_whole_published_config_of_kimi_linear_is_read() -> None:
    config = ModelConfig.from_dict(published_linear())
    assert config.unsupported == ()
    assert config == replace(geometry("kimi-linear"), source="config")
    assert config.moe is not None
    assert (config.moe.experts, config.moe.per_token, config.moe.shared_experts) == (256, 8, 1)
    assert (config.moe.latent_size, config.moe.latent_norm, config.moe.scaling_factor) == (None, False, 2.446)
    assert (config.activation, config.attn_res_block_size) == (Activation("silu"), None)


def test_a_situ_without_its_numbers_has_the_published_ones() -> None:
    assert ModelConfig.from_dict(changed({"hidden_act": "situ"})).activation == Activation("situ", 1.0, None)


def test_what_transformers_writes_besides_changes_nothing() -> None:
    from transformers import PretrainedConfig  # imported here: it takes seconds

    written = {key: value for key, value in PretrainedConfig().to_dict().items() if value is not None}
    assert ModelConfig.from_dict(written | changed({})) == replace(random_config("bounded"), source="config")


def quantised(group: dict[str, Any], **others: Any) -> dict[str, Any]:
    """The published quantisation of K3 with fields of its one group of layers, and of itself, changed."""
    quantisation = dict(published_k3()["text_config"]["quantization_config"])
    published = quantisation["config_groups"]["group_0"]
    weights = published["weights"] | group.pop("weights", {})
    groups = {"group_0": published | group | {"weights": weights}}
    return {"quantization_config": quantisation | {"config_groups": groups} | others}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (quantised({}, format="float-quantized"), "quantization_config"),
        (quantised({}, config_groups={}), "quantization_config"),
        (quantised({}, config_groups={"group_0": None}), "quantization_config"),
        (quantised({}, kv_cache_scheme={"num_bits": 8}), "quantization_config"),
        (quantised({"weights": {"group_size": 16}}), "quantization_config"),
        (quantised({"weights": {"num_bits": 8}}), "quantization_config"),
        (quantised({"weights": {"symmetric": False}}), "quantization_config"),
        (quantised({"weights": {"scale_dtype": "torch.float8_e4m3fn"}}), "quantization_config"),
        (quantised({"input_activations": {"num_bits": 8}}), "quantization_config"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"quantization_config": "fp8"}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"moe_router_activation_func": "softmax"}, "moe_router_activation_func"),
        ({"num_expert_group": 8, "topk_group": 4}, "num_expert_group"),
        ({"mla_use_nope": False}, "mla_use_nope"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"linear.short_conv_kernel_size": 3}, "linear_attn_config.short_conv_kernel_size"),
        ({"linear.allow_neg_eigval": True}, "linear_attn_config.allow_neg_eigval"),
        ({"num_key_value_heads": 1}, "num_key_value_heads"),
        ({"logit_scale": 0.5}, "logit_scale"),
        ({"vision_config": {}}, "vision_config"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    config = ModelConfig.from_dict(changed(change), source="config.json")
    with pytest.raises(ModelConfigError, match="not supported by this version") as caught:
        HybridDecoder(config, {})
    assert (caught.value.key, caught.value.source) == (field, "config.json")


@pytest.mark.parametrize(
    ("outer", "inner", "field"),
    [
        ({}, {"rope_scaling": {"factor": 2.0}}, "text_config.rope_scaling"),
        ({}, {"linear.allow_neg_eigval": True}, "text_config.linear_attn_config.allow_neg_eigval"),
        ({"quantization_config": {"quant_method": "fp8"}}, {}, "quantization_config"),
        ({"tie_word_embeddings": True}, {}, "tie_word_embeddings"),
        ({"logit_scale": 0.5}, {}, "logit_scale"),
    ],
)
def test_what_a_nested_config_asks_for_is_refused_with_its_place(
    outer: dict[str, Any], inner: dict[str, Any], field: str
) -> None:
    config = ModelConfig.from_dict({"text_config": changed(inner)} | outer)
    assert [feature.field for feature in config.unsupported] == [field]
    with pytest.raises(ModelConfigError, match="not supported"):
        config.require_runnable()


def test_a_group_of_all_experts_is_no_group() -> None:
    for groups in ({"num_expert_group": 1}, {"num_expert_group": 4, "topk_group": 4}):
        assert ModelConfig.from_dict(changed(groups)).unsupported == ()


def test_experts_beyond_the_last_layer_are_no_experts() -> None:
    config = ModelConfig.from_dict(changed({"num_experts": 8, "first_k_dense_replace": 4}))
    assert (config.moe, config.unsupported) == (None, ())


def test_experts_are_in_every_so_manieth_layer_from_the_first_on() -> None:
    config = random_config("kimi-linear", layers=6, first_k_dense_replace=1, moe_layer_freq=2)
    assert config.moe is not None
    assert [layer for layer in range(6) if config.moe.has(layer)] == [2, 4]
    config = random_config("kimi-linear", layers=2, first_k_dense_replace=0)
    assert config.moe is not None
    assert config.moe.has(0)


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
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
        ({"num_experts": -8}, "num_experts"),
        (EXPERTS | {"num_experts": True}, "num_experts"),
        (EXPERTS | {"num_experts_per_token": 9}, "num_experts_per_token"),
        (EXPERTS | {"num_experts_per_token": None}, "num_experts_per_token"),
        (EXPERTS | {"moe_intermediate_size": None}, "moe_intermediate_size"),
        (EXPERTS | {"routed_scaling_factor": 0}, "routed_scaling_factor"),
        (EXPERTS | {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        (EXPERTS | {"first_k_dense_replace": False}, "first_k_dense_replace"),
        (EXPERTS | {"moe_renormalize": "yes"}, "moe_renormalize"),
        ({"hidden_act": "situ", "activation_situ_beta": 0.0}, "activation_situ_beta"),
        ({"hidden_act": "situ", "activation_situ_linear_beta": -25}, "activation_situ_linear_beta"),
        ({"attn_res_block_size": 0}, "attn_res_block_size"),
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


def test_a_bad_field_of_a_nested_config_is_named_with_its_place() -> None:
    with pytest.raises(ModelConfigError) as caught:
        ModelConfig.from_dict({"text_config": changed({"linear.num_heads": 0})})
    assert caught.value.key == "text_config.linear_attn_config.num_heads"


def test_the_published_geometries_are_computed_whole() -> None:
    k3, linear = geometry("k3"), geometry("kimi-linear")
    assert (k3.num_layers, len(k3.kda_layers), len(k3.mla_layers)) == (93, 69, 24)
    assert k3.mla_layers[-2:] == (91, 92)
    assert (linear.num_layers, len(linear.kda_layers), len(linear.mla_layers)) == (27, 20, 7)
    assert linear.mla_layers == (3, 7, 11, 15, 19, 23, 26)
    assert k3.unsupported == linear.unsupported == ()
    with pytest.raises(ModelConfigError, match="kimi-linear"):
        geometry("k4")
