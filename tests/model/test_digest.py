"""The model digest: made while a model is loaded, over every bit that the model is, and nothing else."""

from pathlib import Path

import pytest
import torch
from blake3 import blake3
from safetensors.torch import load_file, save_file

from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfig
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.digest import DigestedTensors, model_digest, tensor_hash
from tests.support.counted_tensors import CountedTensors
from tests.support.model_folder import published_tensors, write_folder, write_shards
from tests.support.random_model import Kind, random_model


def test_it_changes_with_any_bit_name_shape_dtype_or_config() -> None:
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
    others.append(model_digest(config, {key: t for key, t in weights.items() if key != name}))
    other = ModelConfig.from_dict({**config.raw, "rms_norm_eps": 1e-6})
    others.append(model_digest(other, weights))
    assert len(set(others)) == len(others)


def test_it_is_the_documented_bytes() -> None:
    config = random_model()[0]
    tensors = {"b": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16), "a": torch.arange(3, dtype=torch.uint8)}
    fields = [
        b"forkpoint model digest 2",
        config.canonical_json(),
        *(b"a", b"uint8", b"[3]", blake3(bytes([0, 1, 2])).digest()),
        *(b"b", b"bfloat16", b"[1, 2]", blake3(bytes.fromhex("c03f00c0")).digest()),
    ]
    stream = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    assert model_digest(config, tensors) == blake3(stream).digest()


def test_a_tensor_has_one_hash_however_many_cores_make_it() -> None:
    big = torch.arange(1 << 20, dtype=torch.int32)
    assert tensor_hash(big) == blake3(big.numpy().tobytes()).digest()
    assert tensor_hash(torch.empty(0, 3)) == blake3(b"").digest()
    assert tensor_hash(torch.tensor(7, dtype=torch.uint8)) == blake3(b"\x07").digest()
    turned = big.view(1024, 1024).t()
    assert tensor_hash(turned) == blake3(turned.contiguous().numpy().tobytes()).digest()


@pytest.mark.parametrize("kind", ["kimi-linear", "k3"])
def test_a_decoder_reads_each_tensor_once_and_that_gives_the_digest(kind: Kind) -> None:
    config, weights = random_model(kind)
    counted = CountedTensors(weights)
    seen: list[tuple[int, int]] = []
    tensors = DigestedTensors(counted, lambda done, total: seen.append((done, total)))
    HybridDecoder(config, tensors)
    assert counted.reads == dict.fromkeys(weights, 1)
    digest = tensors.model_digest(config)
    assert counted.reads == dict.fromkeys(weights, 1)
    assert digest == model_digest(config, weights)
    total = sum(tensor.nbytes for tensor in weights.values())
    assert seen[-1] == (total, total)
    assert len(seen) == len(weights)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_shards_and_a_single_file_of_the_same_tensors_have_one_digest(tmp_path: Path) -> None:
    config, weights = random_model("k3")
    stored = published_tensors(config, weights, torch.bfloat16)
    write_folder(tmp_path / "single", config, weights, torch.bfloat16)
    (tmp_path / "shards").mkdir()
    write_shards(tmp_path / "shards", stored, shards=3)
    digests = {model_digest(config, Checkpoint(tmp_path / name)) for name in ("single", "shards")}
    assert digests == {model_digest(config, stored)}


def test_vision_tensors_are_no_part_of_it(tmp_path: Path) -> None:
    config, weights = random_model()
    write_folder(tmp_path, config, weights)
    digest = model_digest(config, Checkpoint(tmp_path))
    seeing = {"vision_tower.blocks.0.norm0.weight": torch.ones(4), "mm_projector.post_norm.weight": torch.ones(4)}
    save_file(load_file(tmp_path / "model.safetensors") | seeing, tmp_path / "model.safetensors")
    assert model_digest(config, Checkpoint(tmp_path)) == digest
