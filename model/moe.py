"""SparseMoe: a router, routed experts (of the latent width in K3) and one shared block that every row takes."""

from collections.abc import Callable

import torch
from torch import Tensor

from forkpoint.kernels.experts.weights import ExpertMatrix, Experts
from forkpoint.kernels.router.routes import Router
from forkpoint.model.config import ModelConfig
from forkpoint.model.ffn import GluFfn
from forkpoint.model.kernels import Kernels
from forkpoint.model.moe_config import MoeConfig
from forkpoint.model.table import WeightTable


class SparseMoe:
    """Σ weight · expert(x) + shared(x); with a latent width Σ is over down-projected rows, and is normed and projected
    up again. `weights` holds the layer's tensors under their published names after `block_sparse_moe.`; `packed` says
    that the experts are MXFP4."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, weights: WeightTable, packed: bool, kernels: Kernels
    ) -> None:
        self.kernels, self.activation, self.eps = kernels, config.activation, config.rms_norm_eps
        self.router = Router(
            weight=weights["gate.weight"],
            bias=weights["gate.e_score_correction_bias"],
            per_token=moe.per_token,
            renormalize=moe.renormalize,
            scaling_factor=moe.scaling_factor,
            biased_weights=moe.biased_weights,
        )
        self.latent_down = self.latent_up = self.latent_norm = None
        if moe.latent_size is not None:
            self.latent_down = weights["routed_expert_down_proj.weight"]
            self.latent_up = weights["routed_expert_up_proj.weight"]
            self.latent_norm = weights["routed_expert_norm.weight"] if moe.latent_norm else None
        self.shared = GluFfn(weights.inside("shared_experts."), config.activation, kernels)
        self.experts = _experts(weights, moe.experts, packed)

    def forward(self, x: Tensor) -> Tensor:
        """Rows [R, hidden] (normed) to rows [R, hidden]."""
        kernels = self.kernels
        routes, shared = kernels.route(x, self.router), self.shared.forward(x)
        if self.latent_down is None or self.latent_up is None:
            return kernels.experts_sum(x, routes, self.experts, self.activation, shared)
        routed = kernels.experts_sum(kernels.linear(x, self.latent_down), routes, self.experts, self.activation, None)
        if self.latent_norm is not None:
            routed = kernels.rms_norm(routed, self.latent_norm, self.eps)
        return kernels.linear(routed, self.latent_up) + shared


def _experts(weights: WeightTable, experts: int, packed: bool) -> Experts:
    def matrix(suffix: str, *names: str) -> Tensor:
        """One stack [E, N, K], filled expert by expert: no second copy of all experts is ever held."""
        return _stack(experts, lambda e: [weights[f"experts.{e}.{name}.{suffix}"] for name in names])

    if packed:
        gate_up = ExpertMatrix(matrix("weight_packed", "w1", "w3"), matrix("weight_scale", "w1", "w3"))
        return Experts(gate_up, ExpertMatrix(matrix("weight_packed", "w2"), matrix("weight_scale", "w2")))
    return Experts(ExpertMatrix(matrix("weight", "w1", "w3")), ExpertMatrix(matrix("weight", "w2")))


def _stack(experts: int, parts_of: Callable[[int], list[Tensor]]) -> Tensor:
    stack: Tensor | None = None
    for expert in range(experts):
        parts = parts_of(expert)
        if stack is None:
            rows = sum(part.shape[0] for part in parts)
            stack = parts[0].new_empty((experts, rows, *parts[0].shape[1:]))
        torch.cat(parts, out=stack[expert])
    assert stack is not None
    return stack
