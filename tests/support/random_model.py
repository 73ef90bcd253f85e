"""Random models for tests: small configs of both gates with weights of realistic scales."""

from collections.abc import Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.model.inventory import expected_tensors
from forkpoint.model.random_weights import random_tensor

Kind = Literal["bounded", "softplus", "kimi-linear", "k3"]
"""Two gates with dense blocks; and the published architectures with all that they have."""
EXPERTS: Final[dict[str, Any]] = {
    "num_experts": 8,
    "num_experts_per_token": 3,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
}
MIXED: Final[dict[str, Any]] = {
    "num_shared_experts": 2,
    "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True,
    "routed_scaling_factor": 1.5,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "attn_res_block_size": 2,
}
"""What K3 adds; a scaling factor of 1, as published, would hide that it is left out."""


def random_config(
    kind: Kind = "bounded",
    *,
    layers: int = 4,
    heads: int = 2,
    key_dim: int = 16,
    value_dim: int | None = None,
    vocab_size: int = 96,
    mla_layers: Sequence[int] | None = None,
    **overrides: Any,
) -> ModelConfig:
    """A config with an MLA layer last in every four, or the 1-based `mla_layers`.

    `bounded` has K3's gates (full-rank, q-lora, output gate), `softplus` Kimi Linear's (low-rank, plain q);
    `kimi-linear` adds experts, `k3` a latent width for them, SiTU and Attention Residuals. `overrides` are
    `config.json` fields; None removes one.
    """
    bounded = kind in ("bounded", "k3")
    mla = list(range(4, layers + 1, 4)) if mla_layers is None else list(mla_layers)
    linear: dict[str, Any] = {
        "head_dim": key_dim,
        "num_heads": heads,
        "short_conv_kernel_size": 4,
        "kda_layers": [n for n in range(1, layers + 1) if n not in mla],
        "full_attn_layers": mla,
    }
    if value_dim is not None:
        linear["value_head_dim"] = value_dim
    if bounded:
        linear |= {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
    raw: dict[str, Any] = {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "q_lora_rank": 24 if bounded else None,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "mla_use_nope": True,
        "mla_use_output_gate": bounded,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "num_experts": 0,
        "first_k_dense_replace": layers,
        "model_max_length": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "linear_attn_config": linear,
    }
    raw |= (EXPERTS if kind in ("kimi-linear", "k3") else {}) | (MIXED if kind == "k3" else {}) | overrides
    return ModelConfig.from_dict(
        {key: value for key, value in raw.items() if value is not None}, source=f"random {kind}"
    )


def random_weights(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    """bf16-valued fp32 weights under published names, in canonical shapes. K3's experts are MXFP4."""
    packed = config.moe is not None and config.moe.latent_size is not None
    return {name: random_tensor(name, shape, seed) for name, shape in expected_tensors(config, packed).items()}


def fitted(device: torch.device | str, **sizes: Any) -> dict[str, Any]:
    """`sizes`, or on a GPU ones near them that its kernels take: K = V = 128, and a multiple of 16 raw key channels.

    A K other than V becomes three heads, unless `sizes` says how many, and wider latents.
    """
    if torch.device(device).type != "cuda":
        return sizes
    uneven: dict[str, Any] = {"heads": 3, "kv_lora_rank": 64} if sizes.get("value_dim") is not None else {}
    return {**uneven, **sizes, "key_dim": 128, "value_dim": None, "qk_rope_head_dim": 16}


def random_model(
    kind: Kind = "bounded", *, value_dim: int | None = None, layers: int = 4, seed: int = 0, **overrides: Any
) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A random config and weights for it; `value_dim` other than 16 makes K and V differ."""
    config = random_config(kind, value_dim=value_dim, layers=layers, **overrides)
    return config, random_weights(config, seed)
