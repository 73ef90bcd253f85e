"""Weights: every tensor is accounted for before one is read; variants of name, shape and dtype are read."""

import re

import pytest
import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.inventory import expected_tensors
from forkpoint.model.shard import TensorSpec
from forkpoint.model.weights import WeightsError, check_weights
from tests.support.counted_tensors import CountedTensors
from tests.support.random_model import Kind, random_model

Model = tuple[ModelConfig, dict[str, Tensor]]


@pytest.fixture(params=["bounded", "softplus"])
def model(request: pytest.FixtureRequest) -> Model:
    return random_model(request.param, layers=4)


def test_nothing_is_read_before_everything_is_checked(model: Model) -> None:
    config, weights = model
    counted = CountedTensors(weights)
    checked = check_weights(config, counted)
    assert counted.reads == {}
    assert set(checked) == set(expected_tensors(config))
    for name, shape in expected_tensors(config).items():
        assert checked.spec(name) == TensorSpec(weights[name].dtype, shape)
        assert torch.equal(checked[name], weights[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_log_dt_bias_and_the_routers_bias_are_fp32_whatever_is_stored(dtype: torch.dtype) -> None:
    config, weights = random_model("k3")
    stored = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    checked = check_weights(config, stored)
    wide = {name for name in weights if name.endswith((".A_log", ".dt_bias", ".e_score_correction_bias"))}
    assert len(wide) == 2 * 3 + 3
    for name in weights:
        expected = torch.float32 if name in wide else stored[name].dtype
        assert checked[name].dtype == checked.spec(name).dtype == expected
        assert torch.equal(checked[name], stored[name].to(expected))


def test_all_problems_come_in_one_report(model: Model) -> None:
    config, weights = model
    del weights["model.norm.weight"]
    weights["model.layers.0.mlp.extra"] = torch.zeros(1)
    weights["lm_head.weight"] = weights["lm_head.weight"][:-1]
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.float64)
    with pytest.raises(WeightsError) as caught:
        check_weights(config, weights, "somewhere")
    assert caught.value.problems == [
        "model.norm.weight is missing",
        "model.layers.0.mlp.extra is unexpected",
        "lm_head.weight has shape [95, 64], expected [96, 64]",
        "model.layers.0.mlp.up_proj.weight has dtype torch.float64, not a float dtype that this version reads",
    ]
    assert "somewhere" in str(caught.value)
    assert all(problem in str(caught.value) for problem in caught.value.problems)


def test_a_long_report_is_cut_but_counts_the_rest(model: Model) -> None:
    config, _ = model
    with pytest.raises(WeightsError, match=r"and \d+ more"):
        check_weights(config, {})


@pytest.mark.parametrize("shape", [(1, 1, 2, 1), (2,), (2, 1)])
def test_a_log_is_read_with_singleton_axes(model: Model, shape: tuple[int, ...]) -> None:
    config, weights = model
    name = "model.layers.0.self_attn.A_log"
    checked = check_weights(config, weights | {name: weights[name].view(shape)})
    assert torch.equal(checked[name], weights[name])


def test_a_log_padded_with_zeros_is_cut_to_the_heads(model: Model) -> None:
    config, weights = model
    name = "model.layers.0.self_attn.A_log"
    padded = torch.cat([weights[name], torch.zeros(126)])
    assert torch.equal(check_weights(config, weights | {name: padded})[name], weights[name])
    padded[70] = 0.5
    with pytest.raises(WeightsError, match=r"A_log has values beyond its 2 heads"):
        HybridDecoder(config, weights | {name: padded})


@pytest.mark.parametrize("middle", [(), (1,)])
def test_taps_of_a_convolution_are_read_with_and_without_their_middle_axis(
    model: Model, middle: tuple[int, ...]
) -> None:
    config, weights = model
    name = "model.layers.0.self_attn.k_conv1d.weight"
    channels, taps = weights[name].shape
    checked = check_weights(config, weights | {name: weights[name].view(channels, *middle, taps)})
    assert torch.equal(checked[name], weights[name])
    with pytest.raises(WeightsError, match=r"k_conv1d\.weight has shape"):
        check_weights(config, weights | {name: weights[name].view(1, channels, taps)})


@pytest.mark.parametrize("shape", [(1,), (2, 2)])
def test_a_log_of_another_head_count_is_refused(model: Model, shape: tuple[int, ...]) -> None:
    config, weights = model
    with pytest.raises(WeightsError, match="A_log has shape"):
        check_weights(config, weights | {"model.layers.0.self_attn.A_log": torch.zeros(shape)})


@pytest.mark.parametrize("inner", ["model.layers.", "layers."])
def test_the_prefix_of_a_multimodal_checkpoint_is_dropped(model: Model, inner: str) -> None:
    config, weights = model
    wrapped = {"language_model." + re.sub("^model.layers.", inner, name): tensor for name, tensor in weights.items()}
    checked = check_weights(config, wrapped)
    assert all(torch.equal(checked[name], weights[name]) for name in weights)


def test_a_tensor_under_two_spellings_is_refused(model: Model) -> None:
    config, weights = model
    twice = weights | {"language_model.lm_head.weight": weights["lm_head.weight"]}
    with pytest.raises(WeightsError) as caught:
        check_weights(config, twice)
    assert caught.value.problems == ["lm_head.weight is stored as lm_head.weight and as language_model.lm_head.weight"]


def test_early_spellings_of_attention_residuals_are_read() -> None:
    config, weights = random_model("k3")
    legacy = {re.sub(r"_res_(norm|proj)\.weight$", r"_res.\1_weight", name): weights[name] for name in weights}
    assert {"model.output_attn_res.proj_weight", "model.layers.0.mlp_res.norm_weight"} <= set(legacy)
    checked = check_weights(config, legacy)
    assert all(torch.equal(checked[name], weights[name]) for name in weights)


def test_vision_tensors_are_skipped_with_one_note(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    config, weights = model
    names = ["vision_tower.patch_embed.proj.weight", "vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.post"]
    counted = CountedTensors(weights | {name: torch.zeros(3, dtype=torch.float64) for name in names})
    with caplog.at_level("INFO"):
        HybridDecoder(config, counted, source="some folder")
    assert set(counted.reads) == set(weights)
    assert [r.message for r in caplog.records] == ["some folder: 3 vision tensors are skipped, this version reads text"]


def test_packed_experts_are_known_by_their_tensors() -> None:
    config, weights = random_model("k3")
    packed = [name for name in weights if name.endswith(".weight_packed")]
    assert len(packed) == 3 * 8 * 3
    assert set(check_weights(config, weights)) == set(weights)
    plain = {name: tensor for name, tensor in weights.items() if not name.endswith((".weight_packed", ".weight_scale"))}
    shapes = expected_tensors(config, packed=False)
    plain |= {name: torch.zeros(shapes[name]) for name in shapes.keys() - plain.keys()}
    assert set(check_weights(config, plain)) == set(shapes)


def test_packed_experts_without_scales_are_refused() -> None:
    config, weights = random_model("k3")
    name = "model.layers.2.block_sparse_moe.experts.7.w2.weight_scale"
    del weights[name]
    with pytest.raises(WeightsError) as caught:
        check_weights(config, weights)
    assert caught.value.problems == [f"{name} is missing"]


def test_bytes_where_floats_belong_and_floats_where_bytes_do_are_refused() -> None:
    config, weights = random_model("k3")
    wrong = ["lm_head.weight", "model.layers.1.block_sparse_moe.experts.0.w1.weight_packed"]
    weights[wrong[0]] = weights[wrong[0]].to(torch.uint8)
    weights[wrong[1]] = weights[wrong[1]].float()
    with pytest.raises(WeightsError) as caught:
        check_weights(config, weights)
    assert caught.value.problems == [
        f"{wrong[0]} has dtype torch.uint8, not a float dtype that this version reads",
        f"{wrong[1]} has dtype torch.float32, expected bytes (torch.uint8)",
    ]


def test_tied_embeddings_have_no_head_of_their_own() -> None:
    config, weights = random_model(tie_word_embeddings=True)
    assert "lm_head.weight" not in weights
    with pytest.raises(WeightsError, match=r"lm_head\.weight is unexpected"):
        check_weights(config, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})


def test_a_decoder_takes_no_weights_of_another_model(model: Model) -> None:
    config, weights = model
    other, _ = random_model("bounded", hidden_size=48)
    with pytest.raises(WeightsError, match="has shape"):
        HybridDecoder(other, weights)
    HybridDecoder(config, weights)


@pytest.mark.parametrize("kind", ["kimi-linear", "k3"])
def test_no_more_than_one_stored_tensor_is_kept_while_a_decoder_is_built(kind: Kind) -> None:
    config, weights = random_model(kind)
    counted = CountedTensors(weights)
    kept = counted["lm_head.weight"][:1]
    assert counted.kept == weights["lm_head.weight"].nbytes
    del kept
    assert counted.kept == 0
    decoder = HybridDecoder(config, counted)
    assert counted.kept == 0, f"{decoder} keeps memory of what it was made of"
    assert counted.kept_most == max(tensor.nbytes for tensor in weights.values())
