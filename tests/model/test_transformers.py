"""Our logits against Hugging Face transformers' own Kimi Linear, loaded from a folder with the published names."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfig
from forkpoint.model.weights import check_weights
from tests.support.model_folder import write_folder
from tests.support.model_runs import ModelRun, logits_tolerance, random_ids
from tests.support.random_model import Kind, fitted, random_config, random_weights

MLA_LAYERS = (4, 8, 9)


def reference_logits(folder: Path, ids: list[int]) -> Tensor:
    """Logits [T, vocab] of transformers in fp32 with eager attention."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns about kernels that a CPU has no use for
        from transformers import AutoModelForCausalLM  # imported here: it takes four seconds

        load: Any = AutoModelForCausalLM.from_pretrained
        model, report = load(folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.parametrize(("kind", "q_lora_rank"), [("softplus", None), ("softplus", 24), ("kimi-linear", None)])
def test_logits_match_transformers(tmp_path: Path, kind: Kind, q_lora_rank: int | None, device: torch.device) -> None:
    sizes = fitted(device, heads=4, key_dim=32, vocab_size=256, q_lora_rank=q_lora_rank)
    config = random_config(kind, layers=9, mla_layers=MLA_LAYERS, **sizes)
    folder = write_folder(tmp_path, config, random_weights(config, seed=5))
    ours = ModelConfig.from_folder(folder)
    run = ModelRun(ours, check_weights(ours, Checkpoint(folder)), device)
    for slot, count in enumerate((40, 200)):
        ids = random_ids(config, count, seed=count)
        expected = reference_logits(folder, ids)
        logits = run.consume([(slot, ids)])
        assert (logits.cpu() - expected).abs().max() <= logits_tolerance(device) * expected.abs().max()
