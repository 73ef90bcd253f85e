"""The two models that other implementations computed: small, and drawn so that no mistake hides.

Nothing has its neutral value: factors are not 1, biases reorder, head counts are odd, some projections are so weak that
every eps shows. Weights are integers under factors that IEEE rounds alone, so every machine draws the same bits; golden
logits depend on them.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.model.inventory import PACKED_SUFFIX, SCALE_SUFFIX, expected_tensors
from tests.support.model_runs import random_ids
from tests.support.random_model import random_config

TOKENS: Final = 40
SIZES: Final[dict[str, Any]] = {
    "layers": 9,
    "mla_layers": (4, 8, 9),
    "heads": 3,
    "key_dim": 128,
    "vocab_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "v_head_dim": 128,
    "rms_norm_eps": 3e-5,
    "moe_intermediate_size": 64,
    # Read by others only.
    "head_dim": 24,
    "rope_theta": 10000.0,
}
"""Two MLA layers at the end, as K3 has them. Head dims as published: a GPU's kernels take them, and `g_proj` has one
shape in KDA and MLA layers."""
K3_SIZES: Final[dict[str, Any]] = {
    "routed_expert_hidden_size": 128,
    "activation_situ_beta": 1.5,
    "activation_situ_linear_beta": 2.0,
    "attn_res_block_size": 4,
}
"""Two groups of MXFP4 elements in a row of w2 and four in one of w1; three blocks, the last of one layer."""
K3_BOUND: Final = -3.5
QUANTISATION: Final[dict[str, Any]] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 32, "strategy": "group", "symmetric": True},
        }
    },
}
WEAK: Final[dict[str, float]] = {
    "kv_a_proj_with_mqa.weight": 2**-4,
    "q_a_proj.weight": 2**-5,
    "layers.1.self_attn.k_proj.weight": 2**-6,
    "layers.2.self_attn.q_proj.weight": 2**-6,
    "routed_expert_up_proj.weight": 2.0,
}
"""Factors of some projections: what is normed after them is small enough for its eps to matter."""

WEAKER: Final = 6
"""So many powers of two less in w2's scales. K3 norms the weighted sum of its experts, so but for eps no factor of all
weights of a token would show: neither the scaling factor nor whether weights are renormalised."""


@dataclass(frozen=True)
class OracleModel:
    """A model's config and weights, in canonical shapes, and the tokens that are run."""

    config: ModelConfig
    weights: dict[str, Tensor]
    token_ids: list[int]

    def digest(self) -> str:
        """Of the weights: golden logits belong to these."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.weights.items()):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _kimi_linear() -> ModelConfig:
    return random_config("kimi-linear", **SIZES)


def _k3() -> ModelConfig:
    raw = dict(random_config("k3", **SIZES, **K3_SIZES, quantization_config=QUANTISATION).raw)
    raw["linear_attn_config"] = {**raw["linear_attn_config"], "gate_lower_bound": K3_BOUND}
    return ModelConfig.from_dict(raw, source="k3")


CONFIGS: Final[dict[str, Callable[[], ModelConfig]]] = {"kimi-linear": _kimi_linear, "k3": _k3}


@cache
def oracle_model(name: str) -> OracleModel:
    """One of CONFIGS; made once, never changed."""
    config = CONFIGS[name]()
    return OracleModel(config, _exact_weights(config, packed=name == "k3"), random_ids(config, TOKENS, seed=6))


def _exact_weights(config: ModelConfig, packed: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(6)
    weights: dict[str, Tensor] = {}

    def between(low: int, high: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    for name, shape in expected_tensors(config, packed).items():
        if name.endswith(PACKED_SUFFIX):
            weights[name] = between(0, 256).to(torch.uint8)
        elif name.endswith(SCALE_SUFFIX):
            weights[name] = (between(118, 126) - (WEAKER if ".w2." in name else 0)).to(torch.uint8)
        elif name.endswith("A_log"):
            weights[name] = between(0, 64) / 32.0
        elif name.endswith("dt_bias"):
            weights[name] = between(-80, 16) / 16.0
        else:
            weights[name] = _scaled(name, shape, sum((between(-31, 32) for _ in range(3)), torch.zeros(shape)))
    return weights


def _scaled(name: str, shape: tuple[int, ...], dice: Tensor) -> Tensor:
    """The sum of three dice as values of a tensor: N(0, 1 / inputs) of a projection, norms near 1."""
    values = dice / 32.0
    if "norm" in name:
        values = 1 + values / 4.0
    elif name.endswith("e_score_correction_bias"):
        values = values / 4.0
    elif "conv1d" in name:
        values = values / 2.0
    elif "embed_tokens" not in name:
        values = values / math.sqrt(shape[1]) * math.prod(f for end, f in WEAK.items() if name.endswith(end))
    return values.to(torch.bfloat16).float()
