"""load_model: everything a node needs of a model folder."""

from dataclasses import dataclass
from pathlib import Path

import torch

from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfig, ModelConfigError
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.digest import DigestedTensors, LoadProgress
from forkpoint.model.layout import StateLayout
from forkpoint.model.numerics import numerics_id
from forkpoint.model.stops import stop_ids
from forkpoint.model.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve, and the identities that its sessions' bytes depend on."""

    config: ModelConfig
    decoder: HybridDecoder
    tokenizer: Tokenizer
    layout: StateLayout
    model_digest: bytes
    """32 bytes over config and weights."""
    tokenizer_digest: bytes
    """32 bytes over what turns text into ids."""
    numerics_id: str
    end_ids: tuple[int, ...]
    """Ids that end a generation: the folder's stop ids, and the chat form's end of a turn."""


def load_model(
    folder: Path | str, device: torch.device | str = "cpu", progress: LoadProgress | None = None
) -> LoadedModel:
    """Load a Hugging Face folder: `config.json`, safetensors, `tokenizer_config.json`.

    Every tensor is read once, mapped, and goes to `device` as it is read; `progress` is told after each.

    Raises ModelConfigError for a config that is malformed or beyond this version, WeightsError for tensors that do not
    fit it, both before any memory on `device` is taken.
    """
    config = ModelConfig.from_folder(folder)
    config.require_runnable()
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size > config.vocab_size:
        problem = f"{config.vocab_size} is less than the tokenizer's {tokenizer.vocab_size}"
        raise ModelConfigError("vocab_size", config.source, problem)
    end_ids = tuple(dict.fromkeys((*stop_ids(config, folder), tokenizer.turn_end_id)))
    tensors = DigestedTensors(Checkpoint(folder), progress)
    decoder = HybridDecoder(config, tensors, device, source=str(folder))
    kernels = decoder.kernels
    return LoadedModel(
        config=config,
        decoder=decoder,
        tokenizer=tokenizer,
        layout=StateLayout(config, kernels.dtypes),
        model_digest=tensors.model_digest(config),
        tokenizer_digest=tokenizer.digest(),
        numerics_id=numerics_id(device, kernels.dtypes, kernels.compute_dtype, kernels.name),
        end_ids=end_ids,
    )
