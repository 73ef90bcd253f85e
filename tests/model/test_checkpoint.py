"""Checkpoint: folders in the published format, whole and damaged. One report says all; nothing is half loaded."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfig, ModelConfigError
from forkpoint.model.inventory import expected_tensors
from forkpoint.model.loading import load_model
from forkpoint.model.shard import Shard
from forkpoint.model.torch_kernels import TorchKernels
from forkpoint.model.weights import WeightsError, check_weights
from tests.support.model_folder import published_tensors, write_config, write_folder, write_shards, write_tokenizer
from tests.support.random_model import random_model

INDEX = "model.safetensors.index.json"


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00003.safetensors"


def sharded(folder: Path, kind: Any = "kimi-linear", **sizes: Any) -> tuple[ModelConfig, dict[str, str]]:
    """A servable folder of three shards, with K3's prefix and nested config for `k3`; and its index's weight map."""
    config, weights = random_model(kind, vocab_size=272, **sizes)
    stored = published_tensors(config, weights, torch.bfloat16)
    write_config(folder, config)
    write_tokenizer(folder)
    if kind == "k3":
        stored = {f"language_model.{name}": tensor for name, tensor in stored.items()}
        stored["vision_tower.patch_embed.pos_emb.weight"] = torch.zeros(3)
        nested = {"model_type": "kimi_k3", "text_config": dict(config.raw), "vision_config": {}}
        (folder / "config.json").write_text(json.dumps(nested))
    return config, write_shards(folder, stored, shards=3)


def refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What load_model reports of a folder, without having read a tensor or taken device memory for one."""

    def fail(*arguments: object) -> Tensor:
        raise AssertionError(f"read or copied before the checks: {arguments}")

    with monkeypatch.context() as patched:
        patched.setattr(Shard, "read", fail)
        patched.setattr(TorchKernels, "weight", fail)
        with pytest.raises(WeightsError) as caught:
            load_model(folder)
    assert str(folder) in str(caught.value)
    return caught.value.problems


@pytest.mark.parametrize("kind", ["bounded", "kimi-linear"])
def test_a_single_file_gives_every_tensor_as_stored(kind: Any, tmp_path: Path) -> None:
    config, weights = random_model(kind)
    write_folder(tmp_path, config, weights, torch.bfloat16)
    checkpoint, stored = Checkpoint(tmp_path), load_file(tmp_path / "model.safetensors")
    assert set(checkpoint) == set(stored)
    for name, tensor in stored.items():
        assert checkpoint.spec(name).dtype == tensor.dtype
        assert checkpoint.spec(name).shape == tuple(tensor.shape)
        assert checkpoint.spec(name).nbytes == tensor.nbytes
        assert torch.equal(checkpoint[name], tensor)


@pytest.mark.parametrize("kind", ["kimi-linear", "k3"])
def test_shards_of_both_published_forms_give_a_model(kind: Any, tmp_path: Path) -> None:
    config, _ = sharded(tmp_path, kind)
    read = ModelConfig.from_folder(tmp_path)
    checked = check_weights(read, Checkpoint(tmp_path))
    assert set(checked) == set(expected_tensors(config, packed=kind == "k3"))
    assert load_model(tmp_path).config.moe == config.moe


def test_every_dtype_is_read_at_any_offset(tmp_path: Path) -> None:
    """A file may hold an odd number of bytes before a wider tensor, which its writer of today would sort."""
    wide, narrow = torch.tensor([1.5, -2.25, 3.0]), torch.tensor([7, 8, 9], dtype=torch.uint8)
    header = {
        "__metadata__": {"format": "pt"},
        "narrow": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
        "wide": {"dtype": "F32", "shape": [3, 1], "data_offsets": [3, 15]},
        "none": {"dtype": "BF16", "shape": [0, 4], "data_offsets": [15, 15]},
        "scalar": {"dtype": "I64", "shape": [], "data_offsets": [15, 23]},
    }
    data = narrow.numpy().tobytes() + wide.numpy().tobytes() + (-5).to_bytes(8, "little", signed=True)
    write_raw(tmp_path / "model.safetensors", header, data)
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint["narrow"], narrow)
    assert torch.equal(checkpoint["wide"], wide[:, None])
    assert (checkpoint["none"].shape, checkpoint["none"].dtype) == ((0, 4), torch.bfloat16)
    assert checkpoint["scalar"].item() == -5


def test_a_tensor_outlasts_the_checkpoint_and_the_file(tmp_path: Path) -> None:
    big = torch.arange(100_000, dtype=torch.int32)
    save_file({"t": big}, tmp_path / "model.safetensors")
    tensor = Checkpoint(tmp_path)["t"]
    (tmp_path / "model.safetensors").unlink()
    tensor[0] = 5  # a mapping is private: the file would not change
    assert torch.equal(tensor[1:], big[1:])


def test_a_file_is_mapped_as_long_as_a_tensor_of_it_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({name: torch.arange(100_000, dtype=torch.int32) for name in "ab"}, file)
    checkpoint, maps = Checkpoint(tmp_path), Path("/proc/self/maps")
    assert str(file) not in maps.read_text()
    part = checkpoint["a"][5:]
    assert sum(str(file) in line for line in maps.read_text().splitlines()) == 1
    assert torch.equal(part, torch.arange(5, 100_000, dtype=torch.int32))
    del part
    assert str(file) not in maps.read_text()


@pytest.mark.parametrize("kind", ["kimi-linear", "k3"])
def test_a_model_keeps_no_mapping_of_the_files_that_it_was_loaded_from(kind: Any, tmp_path: Path) -> None:
    """Else its weights would change with the files, and its digest would not."""
    config, weights = random_model(kind, vocab_size=272)
    write_folder(tmp_path, config, weights, torch.float32)  # as the kernels of a CPU keep them
    model = load_model(tmp_path)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert torch.equal(model.decoder.head, weights["lm_head.weight"])


def test_a_file_that_changes_between_check_and_reading_is_refused(tmp_path: Path) -> None:
    save_file({"t": torch.zeros(4)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    save_file({"t": torch.ones(4)}, tmp_path / "other")
    (tmp_path / "other").replace(tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"model\.safetensors was changed while it was read"):
        checkpoint["t"]
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightsError, match="does not exist"):
        checkpoint["t"]


def test_a_missing_shard_is_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path)
    (tmp_path / shard(2)).unlink()
    assert refused(tmp_path, monkeypatch) == [f"{shard(2)} does not exist"]


@pytest.mark.parametrize("kept", [0, 5, 300, -1])
def test_a_truncated_shard_is_one_problem(kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path)
    whole = (tmp_path / shard(3)).read_bytes()
    (tmp_path / shard(3)).write_bytes(whole[:kept])
    (problem,) = refused(tmp_path, monkeypatch)
    assert problem.startswith(f"{shard(3)} is cut off: it has {len(whole[:kept])} bytes")


def test_an_index_that_disagrees_is_reported_with_all_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path, "bounded")
    (tmp_path / shard(1)).unlink()
    second = load_file(tmp_path / shard(2))
    gone, bent = sorted(second)[:2]
    changed = {name: tensor for name, tensor in second.items() if name != gone}
    save_file(changed | {bent: second[bent][None].contiguous(), "stray": torch.zeros(1)}, tmp_path / shard(2))
    shape = list(second[bent].shape)
    assert refused(tmp_path, monkeypatch) == [
        f"{shard(1)} does not exist",
        f"{gone} is missing from {shard(2)}",
        f"stray in {shard(2)} is not in the index",
        "stray is unexpected",
        f"{bent} has shape {[1, *shape]}, expected {shape}",
    ]


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight_map = sharded(tmp_path)
    name = next(name for name, file in weight_map.items() if file == shard(1))
    save_file(load_file(tmp_path / shard(2)) | {name: load_file(tmp_path / shard(1))[name]}, tmp_path / shard(2))
    assert refused(tmp_path, monkeypatch) == [f"{name} is in {shard(1)} and in {shard(2)}"]


def test_an_index_whose_shards_are_swapped_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, weight_map = sharded(tmp_path, "bounded")
    swap = {shard(1): shard(2), shard(2): shard(1), shard(3): shard(3)}
    swapped = {name: swap[file] for name, file in weight_map.items()}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": swapped}))
    moved = sorted(name for name, file in weight_map.items() if file != shard(3))
    assert refused(tmp_path, monkeypatch) == [
        f"{name} is in {weight_map[name]}, the index says {swapped[name]}" for name in moved
    ]


@pytest.mark.parametrize(("config_of", "weights_of"), [("k3", "kimi-linear"), ("kimi-linear", "k3")])
def test_the_weights_of_the_other_model_are_refused(
    config_of: Any, weights_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded(tmp_path, weights_of)
    write_config(tmp_path, random_model(config_of, vocab_size=272)[0])
    problems = refused(tmp_path, monkeypatch)
    gates = {
        "k3": ("model.layers.0.self_attn.g_proj.weight", "model.layers.0.self_attn.g_b_proj.weight"),
        "kimi-linear": ("model.layers.0.self_attn.g_b_proj.weight", "model.layers.0.self_attn.g_proj.weight"),
    }
    missing, unexpected = gates[config_of]
    assert {f"{missing} is missing", f"{unexpected} is unexpected"} <= set(problems)


def test_an_unknown_quantisation_is_refused_before_weights_are_looked_for(tmp_path: Path) -> None:
    config, _ = sharded(tmp_path)
    quantised = dict(config.raw) | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(quantised))
    (tmp_path / INDEX).unlink()
    with pytest.raises(ModelConfigError, match=r"quantization_config .*: a quantisation other than MXFP4 is not"):
        load_model(tmp_path)


def test_packed_experts_without_scales_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sharded(tmp_path, "k3")
    for number in (1, 2, 3):
        kept = {n: t for n, t in load_file(tmp_path / shard(number)).items() if not n.endswith(".weight_scale")}
        save_file(kept, tmp_path / shard(number))
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    kept = {name: file for name, file in weight_map.items() if not name.endswith(".weight_scale")}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": kept}))
    problems = refused(tmp_path, monkeypatch)
    assert len(problems) == 3 * 8 * 3
    assert all(problem.endswith(".weight_scale is missing") for problem in problems)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("index", ["[]", "{}", "nonsense", '{"weight_map": 3}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    (tmp_path / INDEX).write_text(index)
    with pytest.raises(WeightsError, match="is no index"):
        Checkpoint(tmp_path)


def test_an_index_must_not_leave_its_folder(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"t": "../t.safetensors"}}))
    with pytest.raises(WeightsError, match="outside its folder"):
        Checkpoint(tmp_path)


def test_a_shard_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(WeightsError, match=r"model\.safetensors can't be read: Is a directory"):
        Checkpoint(tmp_path)


def entry(begin: int, end: int, dtype: str = "F32", shape: object = (2,)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        (b"nonsense", "its header is no JSON"),
        (b"\xff\xfe", "its header is no JSON"),
        (b"[" * 100_000, "its header is no JSON"),
        ([], "its header is no JSON object"),
        (b'{"t": 1, "t": 2}', "t comes twice"),
        ({"t": 3}, "t in model.safetensors has no dtype, shape and two data_offsets"),
        ({"t": {"dtype": "F32", "shape": [2]}}, "has no dtype, shape and two data_offsets"),
        ({"t": entry(0, 8, shape=5)}, "has no dtype, shape and two data_offsets"),
        ({"t": entry(0, 8) | {"data_offsets": [0]}}, "has no dtype, shape and two data_offsets"),
        ({"t": entry(0, 8, "F4")}, "has dtype 'F4', which is unknown here"),
        ({"t": entry(0, 8, shape=[-1, -2])}, "are no sizes"),
        ({"t": entry(0, 8, shape=[True, 2])}, "are no sizes"),
        ({"t": entry(0, 9)}, "has 8 bytes by its shape, and the offsets 0 to 9"),
        ({"t": entry(-8, 0)}, "are no sizes"),
        ({"t": entry(0, 8, shape=[2**40, 2**40])}, "by its shape"),
        ({"t": entry(8, 16)}, "t begins at byte"),
        ({"t": entry(0, 8), "u": entry(4, 12)}, "u begins at byte"),
        ({"t": entry(0, 8), "u": entry(8, 16), "v": entry(16, 24)}, "is cut off: it has"),
        ({"t": entry(0, 8)}, "8 bytes follow its last tensor"),
        ({}, "16 bytes follow its last tensor"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(header: Any, problem: str, tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(16))
    with pytest.raises(WeightsError) as caught:
        check_weights(random_model()[0], Checkpoint(tmp_path))
    assert problem in caught.value.problems[0]


@pytest.mark.parametrize("damage", [lambda whole: b"\xff" * 8 + whole[8:], lambda whole: whole[:7], lambda _: b""])
def test_what_is_no_safetensors_file_is_refused(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    save_file({"t": torch.zeros(4)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(damage((tmp_path / "model.safetensors").read_bytes()))
    with pytest.raises(WeightsError, match=r"model\.safetensors (can't be read|is cut off)"):
        Checkpoint(tmp_path)


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
