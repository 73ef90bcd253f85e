"""open_engine: a model folder to a warm engine and its tokenizer."""

from pathlib import Path
from typing import Final

import torch

from forkpoint.errors import ConfigError
from forkpoint.model.digest import LoadProgress
from forkpoint.model.loading import LoadedModel, load_model
from forkpoint.model.state import StateTensors
from forkpoint.model.tokenizer import Tokenizer
from forkpoint.server.engine.base import ModelFacts
from forkpoint.server.engine.facts import layout_tag
from forkpoint.server.engine.runner import TorchEngine
from forkpoint.server.engine.warm_up import warm_up

THREADS_DEFAULT: Final = 2
"""CPU threads of a product. Fixed, not the machine's core count: another number may give other bits."""


def open_engine(
    model_folder: Path | str,
    device: str = "cpu",
    slots: int = 16,
    pages: int = 1024,
    threads: int = THREADS_DEFAULT,
    cuda_graphs: bool = True,
    sabotage: str | None = None,
    progress: LoadProgress | None = None,
) -> tuple[TorchEngine, Tokenizer]:
    """Load the model, allocate `slots` slots and `pages` pages of 64 tokens on `device`, and run the engine once.

    `cuda_graphs`: on a GPU steps may be recorded and replayed. `progress` is told how much of the model is read. Sets
    the process's torch threads, which are part of the numerics id. Raises ConfigError for a setting out of range and
    for a model folder that can't be served.
    """
    for name, value in (("slots", slots), ("pages", pages), ("threads", threads)):
        if value < 1:
            raise ConfigError(name, "open_engine", f"{value} is not positive")
    torch.set_num_threads(threads)
    model = load_model(model_folder, device, progress)
    model.decoder.replay = cuda_graphs
    engine = engine_of(model, device, slots, pages, sabotage)
    warm_up(engine, thorough=torch.device(device).type == "cuda")
    return engine, model.tokenizer


def engine_of(model: LoadedModel, device: str, slots: int, pages: int, sabotage: str | None = None) -> TorchEngine:
    """A cold engine of a loaded model, with memory for its sequences on `device`."""
    facts = ModelFacts(
        model_digest=model.model_digest,
        tokenizer_digest=model.tokenizer_digest,
        numerics_id=model.numerics_id,
        vocab_size=model.config.vocab_size,
        context_limit=model.config.context_limit,
        layout_tag=layout_tag(model.layout),
        end_ids=model.end_ids,
    )
    tensors = StateTensors.allocate(model.layout, slots, pages, device)
    return TorchEngine(facts, model.decoder, tensors, sabotage)
