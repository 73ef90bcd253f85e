"""Oracle models as folders in the published formats, which other implementations read, and ours too."""

import json
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor

from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfig
from forkpoint.model.weights import check_weights
from tests.oracles.models import OracleModel
from tests.support.model_folder import published_tensors, write_config, write_shards, write_tokenizer
from tests.support.model_runs import ModelRun

PREFIX: Final = "language_model."
PADDED_RATES: Final = 128
"""K3's files hold this many values of A_log whatever the number of heads, zeros behind the last."""
SHARDS: Final = 3
VISION: Final = {
    "vision_tower.patch_embed.proj.weight": torch.ones(8, 3, 2, 2),
    "mm_projector.post_norm.weight": torch.ones(8),
}
"""Not read by a text model."""


def write_published(folder: Path, model: OracleModel) -> Path:
    """Kimi Linear as one file; K3 in shards with an index, wrapped beside a vision model. Returns `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tensors = published_tensors(model.config, model.weights)
    if model.config.attn_res_block_size is None:
        write_config(folder, model.config)
        save_file(tensors, folder / "model.safetensors")
    else:
        (folder / "config.json").write_text(json.dumps(_wrapped_config(model.config), indent=2))
        write_shards(folder, _wrapped_tensors(tensors), SHARDS)
    return folder


def published_logits(folder: Path, ids: list[int], device: torch.device | str = "cpu") -> Tensor:
    """Logits [T, vocab] of our model, read from a folder, in one pass."""
    config = ModelConfig.from_folder(folder)
    run = ModelRun(config, check_weights(config, Checkpoint(folder)), device, slots=1, tokens=len(ids))
    return run.consume([(0, ids)]).cpu()


def _wrapped_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "text_config": dict(config.raw),
        "vision_config": {"patch_size": 14, "vt_hidden_size": 64},
        "media_placeholder_token_id": 5,
    }


def _wrapped_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    wrapped: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith("A_log"):
            tensor = torch.cat([tensor.flatten(), torch.zeros(PADDED_RATES - tensor.numel())])
        wrapped[PREFIX + name] = tensor
    return wrapped | VISION
