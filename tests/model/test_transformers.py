"""Our logits against Hugging Face transformers' own Kimi Linear, loaded from a folder with the published names.

tests/oracles has golden logits of it; this is the live comparison, of what no published model combines.
"""

from pathlib import Path

import torch

from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfig
from forkpoint.model.weights import check_weights
from tests.oracles.with_transformers import transformers_logits
from tests.support.distance import distance
from tests.support.model_folder import write_folder
from tests.support.model_runs import ModelRun, random_ids
from tests.support.random_model import fitted, random_config, random_weights


def test_logits_match_transformers(tmp_path: Path, device: torch.device) -> None:
    """Experts, the unbounded gate and low-rank queries, over more tokens than the golden logits have."""
    sizes = fitted(device, heads=4, key_dim=32, vocab_size=256, q_lora_rank=24)
    config = random_config("kimi-linear", layers=9, mla_layers=(4, 8, 9), **sizes)
    folder = write_folder(tmp_path, config, random_weights(config, seed=5))
    ours = ModelConfig.from_folder(folder)
    ids = random_ids(config, 200)
    expected = transformers_logits(folder, ids)
    run = ModelRun(ours, check_weights(ours, Checkpoint(folder)), device)
    logits = run.consume([(0, ids)])
    far = distance(logits, expected)
    assert far.within(config, device), far
