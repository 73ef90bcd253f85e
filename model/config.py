"""ModelConfig: the geometry of a hybrid KDA/MLA model, from a Hugging Face `config.json`.

`require_runnable` refuses to build a decoder for what this version does not compute, and names the field.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self

from forkpoint.kernels.ffn.activation import ACTIVATIONS, SILU, Activation
from forkpoint.model.config_fields import ConfigFields, ModelConfigError
from forkpoint.model.features import CONV_TAPS, UnsupportedFeature, unsupported_features
from forkpoint.model.moe_config import MoeConfig

__all__ = ["CONV_TAPS", "MLA_INNER_NORM_EPS", "LayerKind", "ModelConfig", "ModelConfigError", "UnsupportedFeature"]

LayerKind = Literal["kda", "mla"]

MLA_INNER_NORM_EPS: Final = 1e-6
"""eps of `q_a_layernorm` and `kv_a_layernorm`: the published code builds them with its class default, not with
`rms_norm_eps`."""


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
    """From `linear_attn_config.value_head_dim`, an extension of ours: published models have `head_dim` for both."""
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
    eos_token_ids: tuple[int, ...]
    """Ids that end a generation, in the order of the file."""
    tie_word_embeddings: bool = False
    moe: MoeConfig | None = None
    """None: every layer has a dense feed-forward block."""
    activation: Activation = SILU
    """Of dense, shared and routed feed-forward blocks alike."""
    attn_res_block_size: int | None = None
    """Layers in a block of Attention Residuals; None: plain residuals."""
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

    def canonical_json(self) -> bytes:
        """`raw` as UTF-8 with sorted keys and no blanks: what the model digest is made over."""
        return json.dumps(self.raw, sort_keys=True, separators=(",", ":")).encode()

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
        outer = ConfigFields(raw, source)
        fields = outer.inside("text_config") if "text_config" in raw else outer
        linear = fields.inside("linear_attn_config")
        layers = fields.integer("num_hidden_layers")
        limit = "model_max_length" if "model_max_length" in fields.raw else "max_position_embeddings"
        bound = linear.optional_number("gate_lower_bound")
        if bound is not None and not -5.45 <= bound < 0:
            raise linear.error("gate_lower_bound", f"{bound} is outside [-5.45, 0)")
        key_dim = linear.integer("head_dim")
        config = cls(
            source=source,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=fields.integer("hidden_size"),
            intermediate_size=fields.integer("intermediate_size"),
            layer_kinds=_layer_kinds(layers, linear),
            kda_heads=linear.integer("num_heads"),
            kda_key_dim=key_dim,
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
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-5),
            context_limit=fields.integer(limit),
            eos_token_ids=_eos_token_ids(outer, fields),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            moe=MoeConfig.from_fields(fields),
            activation=_activation(fields),
            attn_res_block_size=fields.optional_integer("attn_res_block_size"),
            unsupported=unsupported_features(fields, linear, None if fields is outer else outer),
            raw=dict(raw),
        )
        if (largest := max(config.eos_token_ids)) >= config.vocab_size:
            raise fields.error("eos_token_id", f"{largest} is outside the vocabulary")
        return config


def _eos_token_ids(outer: ConfigFields, fields: ConfigFields) -> tuple[int, ...]:
    """What the text model's object names, then what only the object around it does."""
    places = [place for place in dict.fromkeys((fields, outer)) if place.raw.get("eos_token_id") is not None]
    return tuple(dict.fromkeys(i for place in places or [fields] for i in place.token_ids("eos_token_id")))


def _activation(fields: ConfigFields) -> Activation:
    name = fields.raw.get("hidden_act", "silu")
    if name not in ACTIVATIONS:
        return SILU  # refused by `unsupported_features`
    if fields.raw.get("activation_situ_linear_beta") is None:
        return Activation(name, fields.positive("activation_situ_beta", 1.0), None)
    linear_beta = fields.positive("activation_situ_linear_beta", 1.0)
    return Activation(name, fields.positive("activation_situ_beta", 1.0), linear_beta)


def _layer_kinds(layers: int, linear: ConfigFields) -> tuple[LayerKind, ...]:
    """Resolve the 1-based lists `kda_layers` and `full_attn_layers`, which must name each layer exactly once."""
    kda, mla = linear.layer_list("kda_layers"), linear.layer_list("full_attn_layers")
    if sorted(kda + mla) != list(range(1, layers + 1)):
        raise linear.error("kda_layers", f"with full_attn_layers does not name each of the layers 1..{layers} once")
    return tuple("kda" if number in set(kda) else "mla" for number in range(1, layers + 1))
