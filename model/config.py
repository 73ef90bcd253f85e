"""ModelConfig: the geometry of a hybrid KDA/MLA model, from a Hugging Face `config.json`.

What a later version will run (MoE, Attention Residuals, MXFP4, SiTU) is parsed as geometry, so that `forkpoint plan`
knows the real models; `require_runnable` refuses to build a decoder for it and names the field.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self

from forkpoint.errors import ConfigError

LayerKind = Literal["kda", "mla"]

CONV_TAPS: Final = 4
"""Both published models convolve over four inputs; the state layout and the conv kernel rely on it."""
MLA_INNER_NORM_EPS: Final = 1e-6
"""eps of `q_a_layernorm` and `kv_a_layernorm`: the published code builds them with its class default, not with
`rms_norm_eps`."""

_LINEAR_KEYS: Final = frozenset(
    {
        "head_dim",
        "value_head_dim",
        "num_heads",
        "kda_layers",
        "full_attn_layers",
        "short_conv_kernel_size",
        "use_full_rank_gate",
        "gate_lower_bound",
    }
)


class ModelConfigError(ConfigError):
    """A model's config has a field that is missing, malformed, or beyond what this version runs."""


@dataclass(frozen=True, slots=True)
class UnsupportedFeature:
    """A part of the architecture that this version knows of but does not compute: the config `field` and what it is."""

    field: str
    what: str


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and constants of one model. All sizes are numbers of elements; layers are numbered from 0."""

    source: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_kinds: tuple[LayerKind, ...]
    kda_heads: int
    kda_key_dim: int
    kda_value_dim: int
    gate_lower_bound: float | None
    """None: `-exp(A_log)·softplus(z)`; L < 0: `L·sigmoid(exp(A_log)·z)`."""
    full_rank_gate: bool
    """The KDA output gate: one `g_proj`, or low-rank `g_b_proj(g_a_proj(.))` of rank `kda_key_dim`."""
    mla_heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mla_output_gate: bool
    rms_norm_eps: float
    context_limit: int
    """Largest number of tokens in a session."""
    eos_token_id: int
    tie_word_embeddings: bool = False
    unsupported: tuple[UnsupportedFeature, ...] = ()
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The parsed `config.json`, for the model digest."""

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based indices of the KDA layers."""
        return tuple(index for index, kind in enumerate(self.layer_kinds) if kind == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based indices of the MLA layers."""
        return tuple(index for index, kind in enumerate(self.layer_kinds) if kind == "mla")

    @property
    def conv_channels(self) -> int:
        """Channels q|k|v of one KDA layer's short convolution."""
        return self.kda_heads * (2 * self.kda_key_dim + self.kda_value_dim)

    @property
    def latent_dim(self) -> int:
        """Values kept a token and MLA layer: the normed latent, then the raw shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def require_runnable(self) -> None:
        """Raise ModelConfigError for the first feature that this version does not compute."""
        for feature in self.unsupported:
            raise ModelConfigError(feature.field, self.source, f"{feature.what} is not supported by this version")

    @classmethod
    def from_folder(cls, folder: Path | str) -> Self:
        """Read `config.json` of a Hugging Face model folder; raises ModelConfigError."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelConfigError("config.json", str(folder), error.strerror or str(error)) from error
        except ValueError as error:
            raise ModelConfigError("config.json", str(folder), f"is not JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ModelConfigError("config.json", str(folder), "is not a JSON object")
        return cls.from_dict(raw, source=str(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], source: str = "config") -> Self:
        """Parse the fields of a `config.json` (or of its `text_config`); raises ModelConfigError."""
        outer = _Fields(raw, source)
        fields = _Fields(outer.table("text_config"), source) if "text_config" in raw else outer
        linear = _Fields(fields.table("linear_attn_config"), source, "linear_attn_config.")
        if unknown := sorted(set(linear.raw) - _LINEAR_KEYS):
            raise ModelConfigError(f"linear_attn_config.{unknown[0]}", source, "is unknown to this version")
        layers = fields.integer("num_hidden_layers")
        limit = "model_max_length" if "model_max_length" in fields.raw else "max_position_embeddings"
        bound = linear.number("gate_lower_bound", None)
        if bound is not None and not -5.45 <= bound < 0:
            raise ModelConfigError("linear_attn_config.gate_lower_bound", source, f"{bound} is outside [-5.45, 0)")
        key_dim = linear.integer("head_dim")
        config = cls(
            source=source,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            layer_kinds=_layer_kinds(layers, linear),
            kda_heads=linear.integer("num_heads"),
            kda_key_dim=key_dim,
            # An extension of ours: published models have value dim = key dim, and tests want them apart.
            kda_value_dim=linear.integer("value_head_dim", key_dim),
            gate_lower_bound=bound,
            full_rank_gate=linear.flag("use_full_rank_gate"),
            mla_heads=fields.integer("num_attention_heads"),
            q_lora_rank=fields.optional_integer("q_lora_rank"),
            kv_lora_rank=fields.integer("kv_lora_rank"),
            qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
            qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
            v_head_dim=fields.integer("v_head_dim"),
            mla_output_gate=fields.flag("mla_use_output_gate"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5) or 1e-5,
            context_limit=fields.integer(limit),
            eos_token_id=fields.token_id("eos_token_id"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            unsupported=_unsupported(fields, linear, layers),
            raw=dict(raw),
        )
        if config.eos_token_id >= config.vocab_size:
            raise ModelConfigError("eos_token_id", source, f"{config.eos_token_id} is outside the vocabulary")
        return config


class _Fields:
    """Typed reads of a JSON object; every error names the field and the file."""

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self.raw, self.source, self.prefix = raw, source, prefix

    def error(self, key: str, problem: str) -> ModelConfigError:
        return ModelConfigError(self.prefix + key, self.source, problem)

    def table(self, key: str) -> Mapping[str, Any]:
        value = self.raw.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "is missing" if value is None else "is not an object")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.raw.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(key, f"{value!r} is not a positive integer")
        return value

    def optional_integer(self, key: str) -> int | None:
        return None if self.raw.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None) -> float | None:
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(key, f"{value!r} is not a number")
        return float(value)

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.raw.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is not true or false")
        return value

    def token_id(self, key: str) -> int:
        value = self.raw.get(key)
        if isinstance(value, list) and value:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self.error(key, f"{value!r} is not a token id")
        return value

    def layer_list(self, key: str) -> list[int]:
        value = self.raw.get(key)
        if not isinstance(value, list) or not all(
            isinstance(item, int) and not isinstance(item, bool) for item in value
        ):
            raise self.error(key, "is not a list of layer numbers")
        return value


def _layer_kinds(layers: int, linear: _Fields) -> tuple[LayerKind, ...]:
    """Resolve the 1-based lists `kda_layers` and `full_attn_layers`, which must name each layer exactly once."""
    kda, mla = linear.layer_list("kda_layers"), linear.layer_list("full_attn_layers")
    if sorted(kda + mla) != list(range(1, layers + 1)):
        raise linear.error("kda_layers", f"with full_attn_layers does not name each of the layers 1..{layers} once")
    return tuple("kda" if number in set(kda) else "mla" for number in range(1, layers + 1))


def _unsupported(fields: _Fields, linear: _Fields, layers: int) -> tuple[UnsupportedFeature, ...]:
    """What the config asks for and this version does not compute."""
    raw = fields.raw
    found: list[UnsupportedFeature] = []

    def refuse(key: str, what: str) -> None:
        found.append(UnsupportedFeature(key, what))

    if raw.get("num_experts"):
        first = fields.integer("first_k_dense_replace", 1) if raw.get("first_k_dense_replace") != 0 else 0
        every = fields.integer("moe_layer_freq", 1)
        if any(layer >= first and layer % every == 0 for layer in range(layers)):
            refuse("num_experts", f"a mixture of {raw['num_experts']} experts")
    if raw.get("attn_res_block_size") is not None:
        refuse("attn_res_block_size", "Attention Residuals")
    if raw.get("quantization_config") is not None:
        refuse("quantization_config", "quantised weights (MXFP4)")
    if raw.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", f"the activation {raw['hidden_act']!r}")
    if raw.get("mla_use_nope") is False:
        refuse("mla_use_nope", "rotary position encoding")
    if raw.get("rope_scaling") is not None:
        refuse("rope_scaling", "rotary position encoding")
    if raw.get("attention_bias"):
        refuse("attention_bias", "a bias in the attention projections")
    if raw.get("num_nextn_predict_layers"):
        refuse("num_nextn_predict_layers", "multi-token prediction")
    if raw.get("vision_config") is not None:
        refuse("vision_config", "image input")
    if linear.integer("short_conv_kernel_size", CONV_TAPS) != CONV_TAPS:
        refuse("linear_attn_config.short_conv_kernel_size", f"a short convolution of other than {CONV_TAPS} taps")
    return tuple(found)
