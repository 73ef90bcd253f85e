"""MoeConfig: the geometry and constants of a model's mixture of experts."""

from dataclasses import dataclass
from typing import Self

from forkpoint.model.config_fields import ConfigFields


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Sizes are numbers of elements; layers count from 0."""

    experts: int
    per_token: int
    shared_experts: int
    """All shared experts are one feed-forward block of this many times `intermediate_size`."""
    intermediate_size: int
    """Inner width of one expert."""
    latent_size: int | None
    """Width that the routed experts read and write, if it is not the hidden size."""
    latent_norm: bool
    """The routed sum in latent width is RMS-normed before it is projected up."""
    scaling_factor: float
    renormalize: bool
    biased_weights: bool
    """From `router_weight_uses_score_correction_bias`: the experts' weights include the bias that chooses them."""
    first_layer: int
    every: int

    def has(self, layer: int) -> bool:
        """Whether the layer has experts instead of a dense block."""
        return layer >= self.first_layer and layer % self.every == 0

    @classmethod
    def from_fields(cls, fields: ConfigFields) -> Self | None:
        """Read a text model's fields; None when no layer has experts. Raises ModelConfigError."""
        if not fields.count("num_experts", 0):
            return None
        layers = fields.integer("num_hidden_layers")
        first = fields.count("first_k_dense_replace", 1)
        every = fields.integer("moe_layer_freq", 1)
        if not any(layer % every == 0 for layer in range(first, layers)):
            return None
        config = cls(
            experts=fields.integer("num_experts"),
            per_token=fields.integer("num_experts_per_token"),
            shared_experts=fields.integer("num_shared_experts", 1),
            intermediate_size=fields.integer("moe_intermediate_size"),
            latent_size=fields.optional_integer("routed_expert_hidden_size"),
            latent_norm=fields.flag("latent_moe_use_norm"),
            scaling_factor=fields.positive("routed_scaling_factor", 1.0),
            renormalize=fields.flag("moe_renormalize", True),
            biased_weights=fields.flag("router_weight_uses_score_correction_bias"),
            first_layer=first,
            every=every,
        )
        if config.per_token > config.experts:
            raise fields.error("num_experts_per_token", f"{config.per_token} of {config.experts} experts")
        return config
