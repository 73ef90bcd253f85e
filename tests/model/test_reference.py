"""The decoder against the fp64 recurrence, for every choice that a config can make."""

from typing import Any

import pytest
import torch

from forkpoint.model.config import ModelConfig
from tests.support.distance import distance
from tests.support.model_runs import ModelRun, random_ids
from tests.support.random_model import Kind, fitted, random_config, random_weights
from tests.support.reference_model import reference_logits
from tests.support.routes import RecordedRoutes

CASES: list[tuple[Kind, dict[str, Any]]] = [
    ("bounded", {}),
    ("bounded", {"value_dim": 24}),
    ("bounded", {"q_lora_rank": None, "mla_use_output_gate": False}),
    ("bounded", {"tie_word_embeddings": True, "heads": 3, "layers": 5, "mla_layers": [1, 4, 5]}),
    ("softplus", {}),
    ("softplus", {"value_dim": 8, "heads": 8}),
    ("softplus", {"q_lora_rank": 24, "mla_use_output_gate": True}),
    ("kimi-linear", {"num_experts_per_token": 1, "moe_renormalize": False}),
    ("k3", {"layers": 5}),
]


def with_gate(config: ModelConfig, full_rank: bool) -> ModelConfig:
    """The same config with the other KDA output gate."""
    raw = dict(config.raw)
    raw["linear_attn_config"] = {**raw["linear_attn_config"], "use_full_rank_gate": full_rank}
    return ModelConfig.from_dict(raw)


@pytest.mark.parametrize(("kind", "choices"), CASES)
@pytest.mark.parametrize("full_rank", [False, True])
def test_logits_match_the_fp64_recurrence(
    kind: Kind, choices: dict[str, Any], full_rank: bool, device: torch.device
) -> None:
    config = with_gate(random_config(kind, **fitted(device, **choices)), full_rank)
    weights = random_weights(config, seed=3)
    ids = random_ids(config, 150)
    run = ModelRun(config, weights, device, slots=1)
    routes = RecordedRoutes(run.decoder)
    logits = run.consume([(0, ids)])
    assert logits.dtype == torch.float32
    far = distance(logits, reference_logits(config.raw, weights, ids))
    assert far.within(config, device), far
    far = distance(logits, reference_logits(config.raw, weights, ids, routes.layers()))
    assert far.within(config, device, given_routes=True), far


def test_an_untrained_slow_gate_is_exact_enough_over_many_tokens(device: torch.device) -> None:
    config = random_config("softplus", layers=2, mla_layers=[2], **fitted(device))
    weights = random_weights(config)
    for name in weights:
        if name.endswith("dt_bias"):
            weights[name] = torch.full_like(weights[name], -12.0)  # decay of about 1 - 5e-5 a token
    ids = random_ids(config, 500)
    expected = reference_logits(config.raw, weights, ids)
    logits = ModelRun(config, weights, device, slots=1).consume([(0, ids)])
    far = distance(logits, expected)
    assert far.within(config, device), far
