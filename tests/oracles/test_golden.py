"""Our logits, and the fp64 reference's, against what other implementations computed (`python -m tests.oracles`)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.oracles.folders import published_logits, write_published
from tests.oracles.golden import ORACLES, Golden, agrees
from tests.oracles.models import oracle_model
from tests.support.distance import distance
from tests.support.reference_model import reference_logits


@pytest.mark.parametrize(("name", "oracle"), ORACLES)
def test_logits_match_another_implementations(tmp_path: Path, name: str, oracle: str, device: torch.device) -> None:
    model, golden = oracle_model(name), Golden.read(name, oracle)
    assert golden.digest == model.digest(), "the golden logits are of other weights"
    assert golden.token_ids == model.token_ids
    logits = published_logits(write_published(tmp_path, model), model.token_ids, device)
    far = distance(logits, golden.logits)
    assert agrees(name, far, device), far


@pytest.mark.parametrize(("name", "oracle"), ORACLES)
def test_the_fp64_reference_agrees_with_another_implementation(tmp_path: Path, name: str, oracle: str) -> None:
    model, golden = oracle_model(name), Golden.read(name, oracle)
    folder = write_published(tmp_path, model)
    tensors = {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}
    logits = reference_logits(json.loads((folder / "config.json").read_text()), tensors, model.token_ids)
    far = distance(golden.logits, logits)
    assert agrees(name, far), far
