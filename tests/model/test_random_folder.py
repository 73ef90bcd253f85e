"""Random model folders: loadable by the loader of published ones, equal for equal arguments, one shard in memory."""

import json
import math
import shutil
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from forkpoint.errors import ConfigError
from forkpoint.model import random_folder
from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfig
from forkpoint.model.geometry_sizes import GeometrySizes, sized_config
from forkpoint.model.loading import load_model
from forkpoint.model.random_folder import RandomFolder
from forkpoint.model.weights import check_weights
from forkpoint.server.engine.batch import Sample, Work
from forkpoint.server.engine.open import open_engine
from tests.support.random_model import random_weights

TINY = GeometrySizes(layers=4, hidden=64, heads=2, ffn=32, experts=3, vocab=272)
Usage = namedtuple("Usage", "total used free")


def folder_of(name: str, **options: Any) -> RandomFolder:
    return RandomFolder(sized_config(name, TINY), **options)


@pytest.mark.parametrize("name", ["kimi-linear", "k3"])
def test_a_made_folder_is_served_like_a_published_one(tmp_path: Path, name: str) -> None:
    made = folder_of(name, seed=3, shard_bytes=1 << 19)
    assert len(made.shards) > 2
    told: list[int] = []
    made.write(tmp_path / "model", told.append)
    assert sum(told) == made.weight_bytes and len(told) == len(made.shards)
    config = ModelConfig.from_folder(tmp_path / "model")
    checked = check_weights(config, Checkpoint(tmp_path / "model"))
    weights = random_weights(config, seed=3)
    assert all(torch.equal(checked[name].to(weights[name].dtype), weights[name]) for name in weights)
    model = load_model(tmp_path / "model")
    assert model.end_ids == (model.tokenizer.turn_end_id,) == (261,)
    assert model.tokenizer.decode_bytes([104, 105, 271]) == b"hi"


def test_equal_arguments_give_equal_files_and_another_seed_others(tmp_path: Path) -> None:
    for place, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder_of("kimi-linear", seed=seed).write(tmp_path / place)
    names = sorted(path.name for path in (tmp_path / "a").iterdir())
    contents = [[(tmp_path / place / name).read_bytes() for name in names] for place in "abc"]
    assert contents[0] == contents[1] != contents[2]


def test_a_model_that_never_stops_has_no_logits_but_those_of_bytes(tmp_path: Path) -> None:
    folder_of("k3", never_stop=True).write(tmp_path)
    weight = Checkpoint(tmp_path)["language_model.lm_head.weight"]
    assert not weight[256:].any() and weight[:256].any(dim=1).all()


def test_the_index_tells_the_bytes_of_the_tensors(tmp_path: Path) -> None:
    made = folder_of("k3", shard_bytes=1 << 19)
    made.write(tmp_path)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == made.weight_bytes == sum(t.nbytes for t in Checkpoint(tmp_path).values())
    for file in set(index["weight_map"].values()):
        assert (tmp_path / file).stat().st_mode == (tmp_path / "config.json").stat().st_mode
        with safe_open(tmp_path / file, framework="pt") as opened:
            assert all(index["weight_map"][name] == file for name in opened.keys())  # noqa: SIM118 - no mapping


def test_one_shard_at_a_time_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    left: list[int] = []

    def save(tensors: dict[str, Tensor], path: Path) -> None:
        left.append(sum(ref() is not None for ref in alive))
        path.touch()
        alive.extend(weakref.ref(tensor) for tensor in tensors.values())

    monkeypatch.setattr(random_folder, "save_file", save)
    folder_of("kimi-linear", shard_bytes=1 << 19).write(tmp_path)
    assert len(left) > 2 and set(left) == {0}


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine")
    for taken in (tmp_path, tmp_path / "notes"):
        with pytest.raises(ConfigError, match="not an empty folder") as caught:
            folder_of("k3").write(taken)
        assert caught.value.key == "DIR"
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_a_disk_without_room_is_told_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 5, 5))
    with pytest.raises(ConfigError, match=r"bytes are needed and 5 are free") as caught:
        folder_of("k3").write(tmp_path / "new" / "model")
    assert caught.value.key == "DIR" and not (tmp_path / "new").exists()


def test_an_interrupted_folder_loads_nowhere(tmp_path: Path) -> None:
    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        folder_of("k3").write(tmp_path, stop)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["kimi-linear", "k3"])
def test_a_model_that_never_stops_streams_bytes_that_vary(tmp_path: Path, name: str) -> None:
    folder_of(name, never_stop=True).write(tmp_path)
    engine, _ = open_engine(tmp_path, slots=1, pages=1)
    sequence, token, found = engine.create(), 65, []
    for position in range(24):
        (sampled,) = engine.step([Work(sequence, position, (token,), Sample(0.0, 0, 1.0, 0.0, 0, logprobs=True))])
        assert sampled is not None and sampled.logprob is not None and math.isfinite(sampled.logprob)
        token = sampled.token_id
        found.append(token)
    assert max(found) < 256 and len(set(found)) > 4
