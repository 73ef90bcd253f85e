"""A published model's config.json with some sizes chosen: what `forkpoint model make` writes. Needs no torch."""

from dataclasses import dataclass, fields
from typing import Any, Final

from forkpoint.kernels.experts.format import GROUP
from forkpoint.model.config import ModelConfig, ModelConfigError
from forkpoint.model.geometries import WRAPPERS, geometry

BYTE_VALUES: Final = 256
"""Ids below are bytes."""
CONTROL_NAMES: Final = ("<|pad|>", "<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>")
"""Control tokens of a model of bytes, by id from BYTE_VALUES on."""
_SPECIAL: Final = {"bos_token_id": "<|bos|>", "eos_token_id": "<|end|>", "pad_token_id": "<|pad|>"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GeometrySizes:
    """Sizes that differ from the published ones; None: as published."""

    layers: int | None = None
    """The first so many of the published ones."""
    hidden: int | None = None
    """K3's routed experts read rows of half this width."""
    heads: int | None = None
    """Of KDA and of MLA layers."""
    ffn: int | None = None
    """Inner width of an expert. The dense first layer is as many times wider as in the published model."""
    experts: int | None = None
    vocab: int | None = None


def sized_config(name: str, sizes: GeometrySizes, dtype: str = "bfloat16") -> dict[str, Any]:
    """config.json of the published model `name` with these sizes and a byte tokenizer's ids, in its published form:
    K3's text model is nested. Raises ModelConfigError naming the size that does not go."""
    raw = {**geometry(name).raw, "dtype": dtype}
    for entry in fields(sizes):
        value = getattr(sizes, entry.name)
        if value is not None and value < 1:
            raise _error(name, entry.name, f"{value} is not positive")
    if sizes.layers is not None:
        _cut(raw, sizes.layers, name)
    if sizes.hidden is not None:
        raw["hidden_size"] = sizes.hidden
        if "routed_expert_hidden_size" in raw:
            raw["routed_expert_hidden_size"] = sizes.hidden // 2
    if sizes.heads is not None:
        raw |= {"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.heads}
        raw["linear_attn_config"] = {**raw["linear_attn_config"], "num_heads": sizes.heads}
    if sizes.ffn is not None:
        dense = raw["intermediate_size"] // raw["moe_intermediate_size"]
        raw |= {"moe_intermediate_size": sizes.ffn, "intermediate_size": dense * sizes.ffn}
    if sizes.experts is not None:
        chosen = min(raw["num_experts_per_token"], sizes.experts)
        raw |= {"num_experts": sizes.experts, "num_experts_per_token": chosen}
    if sizes.vocab is not None:
        raw["vocab_size"] = sizes.vocab
    raw |= {field: BYTE_VALUES + CONTROL_NAMES.index(token) for field, token in _SPECIAL.items()}
    _check(raw, name)
    return {**WRAPPERS[name], "text_config": raw} if name in WRAPPERS else raw


def _error(name: str, field: str, problem: str) -> ModelConfigError:
    return ModelConfigError(field, f"geometry {name}", problem)


def _cut(raw: dict[str, Any], layers: int, name: str) -> None:
    """Keep the first layers, at least one of either kind."""
    linear, all_layers = raw["linear_attn_config"], raw["num_hidden_layers"]
    least = max(linear["kda_layers"][0], linear["full_attn_layers"][0])
    if not least <= layers <= all_layers:
        raise _error(name, "layers", f"{layers} is outside {least}..{all_layers}: layer {least} is the first MLA layer")
    kept = {key: [n for n in linear[key] if n <= layers] for key in ("kda_layers", "full_attn_layers")}
    raw |= {"num_hidden_layers": layers, "linear_attn_config": {**linear, **kept}}


def _check(raw: dict[str, Any], name: str) -> None:
    """What the config's own checks can't know: groups of quantised experts, and ids of the tokenizer."""
    if (least := BYTE_VALUES + len(CONTROL_NAMES)) > raw["vocab_size"]:
        raise _error(name, "vocab", f"{raw['vocab_size']} is less than {least}, a byte tokenizer's ids")
    if "quantization_config" in raw:
        if raw["moe_intermediate_size"] % GROUP:
            raise _error(name, "ffn", f"{raw['moe_intermediate_size']} is not a multiple of {GROUP}, an MXFP4 group")
        if raw["hidden_size"] % (2 * GROUP):
            problem = f"{raw['hidden_size']} is not a multiple of {2 * GROUP}: experts read half of it in MXFP4 groups"
            raise _error(name, "hidden", problem)
    ModelConfig.from_dict(raw, source=f"geometry {name}")
