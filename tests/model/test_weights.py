"""Weights: every tensor of a folder is accounted for, variants of shape are read, a digest names every byte."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.inventory import expected_tensors
from forkpoint.model.weights import WeightsError, check_weights, model_digest, read_tensors
from tests.support.model_folder import published_tensors, write_folder, write_shards
from tests.support.random_model import random_model

Model = tuple[ModelConfig, dict[str, Tensor]]


@pytest.fixture(params=["bounded", "softplus"])
def model(request: pytest.FixtureRequest) -> Model:
    return random_model(request.param, layers=4)


def test_a_single_file_gives_every_tensor_as_stored(model: Model, tmp_path: Path) -> None:
    config, weights = model
    write_folder(tmp_path, config, weights, torch.bfloat16)
    checked = check_weights(config, read_tensors(tmp_path))
    assert set(checked) == set(expected_tensors(config))
    for name, tensor in checked.items():
        assert tensor.dtype == torch.bfloat16
        assert tuple(tensor.shape) == expected_tensors(config)[name]
        if not name.endswith(("A_log", "dt_bias")):
            assert torch.equal(tensor.float(), weights[name])


def test_shards_give_what_a_single_file_gives(model: Model, tmp_path: Path) -> None:
    config, weights = model
    write_shards(tmp_path, published_tensors(config, weights), shards=3)
    checked = check_weights(config, read_tensors(tmp_path))
    assert all(torch.equal(checked[name], weights[name]) for name in weights)


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
    with pytest.raises(WeightsError, match=r"A_log has shape \[128\], expected \[2\]"):
        check_weights(config, weights | {name: padded})


@pytest.mark.parametrize("shape", [(1,), (2, 2)])
def test_a_log_of_another_head_count_is_refused(model: Model, shape: tuple[int, ...]) -> None:
    config, weights = model
    with pytest.raises(WeightsError, match="A_log has shape"):
        check_weights(config, weights | {"model.layers.0.self_attn.A_log": torch.zeros(shape)})


def test_the_prefix_of_a_multimodal_checkpoint_is_dropped(model: Model) -> None:
    config, weights = model
    wrapped = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    assert set(check_weights(config, wrapped)) == set(weights)
    with pytest.raises(WeightsError, match="with and without"):
        check_weights(config, wrapped | {"lm_head.weight": weights["lm_head.weight"]})


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


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="neither"):
        read_tensors(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(WeightsError, match=r"model.safetensors can't be read"):
        read_tensors(tmp_path)


def test_shards_that_disagree_with_their_index_are_reported_together(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((2,), float(i)) for i in range(6)}
    write_shards(tmp_path, tensors, shards=3)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    save_file({"t1": tensors["t1"], "stray": tensors["t0"]}, tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(WeightsError) as caught:
        read_tensors(tmp_path)
    assert caught.value.problems == [
        "model-00001-of-00003.safetensors does not exist",
        "t4 is missing from model-00002-of-00003.safetensors",
        "stray in model-00002-of-00003.safetensors is not in the index",
    ]


@pytest.mark.parametrize("index", ["[]", "{}", "nonsense", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match="is no index"):
        read_tensors(tmp_path)


def test_an_index_must_not_leave_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"t": "../t.safetensors"}}))
    with pytest.raises(WeightsError, match="outside its folder"):
        read_tensors(tmp_path)


def test_the_model_digest_changes_with_any_bit_name_shape_dtype_or_config() -> None:
    config, weights = random_model()
    digest = model_digest(config, weights)
    assert len(digest) == 32
    assert digest == model_digest(config, dict(reversed(weights.items())))
    others = [digest]
    for name in ("lm_head.weight", "model.layers.3.self_attn.o_proj.weight"):
        flipped = weights[name].clone()
        flipped.view(torch.int32).view(-1)[-1] ^= 1
        others.append(model_digest(config, weights | {name: flipped}))
    name = "model.norm.weight"
    others.append(model_digest(config, {("x" + key if key == name else key): t for key, t in weights.items()}))
    others.append(model_digest(config, weights | {name: weights[name][None]}))
    others.append(model_digest(config, weights | {name: weights[name].view(torch.int32)}))
    other = ModelConfig.from_dict({**config.raw, "rms_norm_eps": 1e-6})
    others.append(model_digest(other, weights))
    assert len(set(others)) == len(others)
