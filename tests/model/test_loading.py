"""load_model: a folder gives a working model and the identities of its bytes."""

import json
from pathlib import Path

import pytest
import torch

from forkpoint.chat import Chat, ChatTurn
from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfigError
from forkpoint.model.digest import model_digest
from forkpoint.model.loading import load_model
from forkpoint.model.numerics import numerics_id
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import StateTensors
from forkpoint.model.weights import WeightsError
from tests.support.model_folder import write_folder, write_tokenizer
from tests.support.random_model import random_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config, weights = random_model(vocab_size=272)
    return write_folder(tmp_path / "model", config, weights, torch.bfloat16)


def test_a_folder_gives_a_working_model(folder: Path) -> None:
    model = load_model(folder)
    tensors = StateTensors.allocate(model.layout, slots=1, pages=1)
    tensors.reset_slot(0)
    ids = list(model.tokenizer.render_chat(Chat((ChatTurn("user", b"hello"),), True)).at(0))
    rows = model.decoder.forward(RowBatch(ids, [0, len(ids)], [0], [0], [[0]]), tensors)
    logits = model.decoder.logits(rows[-1:])
    assert logits.shape == (1, 272)
    assert logits.isfinite().all()
    assert (len(model.model_digest), len(model.tokenizer_digest)) == (32, 32)
    assert model.numerics_id == numerics_id()
    assert load_model(folder).model_digest == model.model_digest


def test_a_model_that_was_loaded_has_the_digest_of_its_folder_and_told_how_far_it_was(folder: Path) -> None:
    told: list[tuple[int, int]] = []
    model = load_model(folder, progress=lambda done, total: told.append((done, total)))
    checkpoint = Checkpoint(folder)
    assert model.model_digest == model_digest(model.config, checkpoint)
    total = sum(checkpoint.spec(name).nbytes for name in checkpoint)
    assert (len(told), told[-1]) == (len(checkpoint), (total, total))


def test_a_loading_that_is_stopped_ends(folder: Path) -> None:
    read: list[int] = []

    def stop_at_the_third(done: int, total: int) -> None:
        read.append(done)
        if len(read) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_model(folder, progress=stop_at_the_third)
    assert len(read) == 3


def test_a_config_beyond_this_version_is_refused_before_weights_are_read(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"attention_bias": True}))
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelConfigError, match="attention_bias"):
        load_model(folder)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(folder: Path) -> None:
    write_tokenizer(folder, ("<|assistant|>", "<|end|>", *(f"<|reserved_{i}|>" for i in range(15))))
    with pytest.raises(ModelConfigError, match="vocab_size"):
        load_model(folder)


def test_weights_of_another_config_are_refused(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"intermediate_size": 95}))
    with pytest.raises(WeightsError, match=r"up_proj.weight has shape \[96, 64\], expected \[95, 64\]"):
        load_model(folder)
