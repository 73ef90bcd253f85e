"""Mistakes that ports of these models made or could make, each as one change of ours (spec: known pitfalls)."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from forkpoint.kernels.attn_res import naive as attn_res
from forkpoint.kernels.elementwise import sigmoid, silu, softplus
from forkpoint.kernels.experts import mxfp4
from forkpoint.kernels.experts.naive import matrix
from forkpoint.kernels.experts.weights import Experts
from forkpoint.kernels.ffn.activation import SILU, Activation
from forkpoint.kernels.ffn.naive import glu
from forkpoint.kernels.matmul.naive import linear
from forkpoint.kernels.norm.naive import l2_norm, rms_norm
from forkpoint.kernels.router.routes import Routes
from forkpoint.model import mla_layer, torch_kernels
from forkpoint.model.config import ModelConfig
from forkpoint.model.decoder import DecoderLayer, HybridDecoder
from forkpoint.model.mla_layer import MlaAttention
from forkpoint.model.moe import SparseMoe
from forkpoint.model.residual import BlockNorm, MixedStream, Stream


@dataclass
class Bench:
    """What a mistake may change: config and weights before the decoder is built, the code, and the decoder itself."""

    config: ModelConfig
    weights: dict[str, Tensor]
    patch: pytest.MonkeyPatch
    built: list[Callable[[HybridDecoder], None]] = field(default_factory=list)


Change = Callable[[Bench], None]


def config(**changes: Any) -> Change:
    """Other values in the config, for the same weights."""

    def change(bench: Bench) -> None:
        bench.config = dataclasses.replace(bench.config, **changes)

    return change


def moe(**changes: Any) -> Change:
    """Other values in the config of the experts."""

    def change(bench: Bench) -> None:
        assert bench.config.moe is not None
        bench.config = dataclasses.replace(bench.config, moe=dataclasses.replace(bench.config.moe, **changes))

    return change


def weights(ends: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Every weight whose name ends so, changed."""

    def apply(bench: Bench) -> None:
        names = [name for name in bench.weights if name.endswith(ends)]
        assert names, ends
        bench.weights |= {name: change(bench.weights[name]) for name in names}

    return apply


def code(owner: object, name: str, new: object) -> Change:
    """Another function in the place of one of ours."""

    def change(bench: Bench) -> None:
        bench.patch.setattr(owner, name, new)

    return change


def decoder(change: Callable[[HybridDecoder], None]) -> Change:
    """The decoder, once it is built."""
    return lambda bench: bench.built.append(change)


def _swap_w1_and_w3(bench: Bench) -> None:
    turned = {"w1": "w3", "w3": "w1"}
    parts = {name: name.split(".") for name in bench.weights if ".experts." in name}
    old = dict(bench.weights)
    for name, part in parts.items():
        bench.weights[name] = old[".".join(turned.get(piece, piece) for piece in part)]


def _exchange_gates(bench: Bench) -> None:
    """KDA and MLA layers have a g_proj of the same name and, in K3, of the same shape."""
    kda, mla = (f"model.layers.{layer}.self_attn.g_proj.weight" for layer in (2, 3))
    assert bench.weights[kda].shape == bench.weights[mla].shape
    bench.weights[kda], bench.weights[mla] = bench.weights[mla], bench.weights[kda]


def _swap_nibbles(packed: Tensor) -> Tensor:
    return (packed << 4) | (packed >> 4)


def _without_the_second_half(matrix: Tensor) -> Tensor:
    return torch.cat([matrix[:, : matrix.shape[1] // 2], torch.zeros_like(matrix[:, matrix.shape[1] // 2 :])], dim=1)


def _clamped_gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    gate = -A_log.exp()[:, None] * softplus(z + dt_bias)
    return ((gate if lower_bound is None else gate.clamp(min=lower_bound)) / 2**-22 * 1.442695).to(torch.int32)


def _bias_after_the_rate(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    rate = A_log.exp()[:, None]
    gate = -(rate * softplus(z) + dt_bias) if lower_bound is None else lower_bound * sigmoid(rate * z + dt_bias)
    return (gate.clamp(max=0.0) / 2**-22 * 1.442695).to(torch.int32)


def _gate_before_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(o * sigmoid(gate), weight, eps)


def _silu_gate(o: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(o, weight, eps) * silu(gate)


def _score_of_the_query_width(model: HybridDecoder) -> None:
    for layer in model.layers:
        if isinstance(layer.attention, MlaAttention):
            layer.attention.scale = layer.attention.nope**-0.5


def _without_latent_norm(model: HybridDecoder) -> None:
    for layer in model.layers:
        if isinstance(layer.ffn, SparseMoe):
            layer.ffn.latent_norm = None


def _normed_bank(self: MixedStream) -> None:
    assert self._x is not None
    self._bank[self._banked] = rms_norm(self._x, torch.ones(self._x.shape[1]), 1e-5)
    self._banked, self._x = self._banked + 1, None


def _sum_goes_on(self: MixedStream) -> None:
    assert self._x is not None
    self._bank[self._banked] = self._x
    self._banked += 1


def _mixture_goes_on(self: DecoderLayer, stream: Stream, step: Any) -> None:
    rows = stream.read(self.attention_norm, self.eps)
    if self.opens_block:
        assert isinstance(stream, MixedStream)
        mixed = rows / self.attention_norm.weight
        stream._bank[stream._banked] = mixed
        stream._banked, stream._x = stream._banked + 1, None
    stream.add(self.attention.forward(rows, step))
    stream.add(self.ffn.forward(stream.read(self.ffn_norm, self.eps)))


_mix = attn_res.mix


def _normed_values(bank: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    ones = torch.ones_like(weight)
    return _mix(rms_norm(bank, ones, eps), rms_norm(x, ones, eps), weight, eps)


def _with_a_temperature(bank: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _mix(bank, x, weight * weight.shape[0] ** -0.5, eps)


def _no_mixture_at_the_end(model: HybridDecoder) -> None:
    model.norm = BlockNorm(model.norm.weight)


def _last_slot_reused(bank: Tensor, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _mix(bank[:2], x, weight, eps)


def _normalize_by_maximum(x: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt().clamp(min=eps)


def _situ(bench: Bench, **changes: Any) -> None:
    bench.config = dataclasses.replace(bench.config, activation=dataclasses.replace(bench.config.activation, **changes))


def _weight_before_down(
    x: Tensor, routes: Routes, experts: Experts, activation: Activation, shared: Tensor | None
) -> Tensor:
    """The same sum in another order: experts descending, weights before the down projection."""
    total = torch.zeros_like(x)
    for expert in reversed(range(experts.down.values.shape[0])):
        share = (routes.weights * (routes.experts == expert)).sum(1, keepdim=True)
        gate, up = linear(x, matrix(experts.gate_up, expert)).chunk(2, dim=1)
        total += linear(share * glu(gate, up, activation), matrix(experts.down, expert))
    return total if shared is None else total + shared


BOTH: Final = ("kimi-linear", "k3")
LINEAR: Final = ("kimi-linear",)
K3: Final = ("k3",)
MISTAKES: Final[dict[str, tuple[tuple[str, ...], Change]]] = {
    "routed_scaling_factor is left out": (BOTH, moe(scaling_factor=1.0)),
    "experts weighted by the biased scores": (BOTH, moe(biased_weights=True)),
    "experts' weights not renormalised": (BOTH, moe(renormalize=False)),
    "experts chosen without the bias": (BOTH, weights("e_score_correction_bias", torch.zeros_like)),
    "gate and up of experts exchanged": (LINEAR, _swap_w1_and_w3),
    "no shared expert": (LINEAR, weights("shared_experts.down_proj.weight", torch.zeros_like)),
    "one shared expert of two": (K3, weights("shared_experts.down_proj.weight", _without_the_second_half)),
    "no norm of the latent sum": (K3, decoder(_without_latent_norm)),
    "silu instead of situ": (K3, config(activation=SILU)),
    "linear_beta ignored": (K3, lambda bench: _situ(bench, linear_beta=None)),
    "beta of situ ignored": (K3, lambda bench: _situ(bench, beta=1.0)),
    "high nibble first": (K3, weights("weight_packed", _swap_nibbles)),
    "sign of an element ignored": (K3, weights("weight_packed", lambda packed: packed & 0x77)),
    "scales off by one": (K3, weights("weight_scale", lambda scale: scale + 1)),
    "subnormal element taken for zero": (K3, code(mxfp4, "MAGNITUDES", (0.0, 0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))),
    "rates read from the padding": (K3, weights("A_log", torch.zeros_like)),
    "a decay gate that is clamped": (K3, code(torch_kernels, "kda_gate", _clamped_gate)),
    "the bounded gate for Kimi Linear": (LINEAR, config(gate_lower_bound=-5.0)),
    "the unbounded gate for K3": (K3, config(gate_lower_bound=None)),
    "another bound": (K3, config(gate_lower_bound=-5.0)),
    "dt_bias added behind the rate": (LINEAR, code(torch_kernels, "kda_gate", _bias_after_the_rate)),
    "taps of the convolution turned around": (LINEAR, weights("conv1d.weight", lambda taps: taps.flip(-1))),
    "rms_norm_eps of L2 norms": (LINEAR, code(torch_kernels, "l2_norm", lambda x: l2_norm(x, 1e-5))),
    "a maximum instead of eps in L2 norms": (LINEAR, code(torch_kernels, "l2_norm", _normalize_by_maximum)),
    "another rms_norm_eps": (K3, config(rms_norm_eps=1e-5)),
    "rms_norm_eps of MLA's inner norms": (BOTH, code(mla_layer, "MLA_INNER_NORM_EPS", 1e-5)),
    "gate before norm in KDA": (K3, code(torch_kernels, "gated_rms_norm", _gate_before_norm)),
    "a silu as the gate of KDA": (LINEAR, code(torch_kernels, "gated_rms_norm", _silu_gate)),
    "no output gate in MLA": (K3, code(torch_kernels.TorchKernels, "gated", lambda self, x, gate: x)),
    "output gates of KDA and MLA exchanged": (K3, _exchange_gates),
    "scores scaled by the width without position": (K3, decoder(_score_of_the_query_width)),
    "a normed bank": (K3, code(MixedStream, "open_block", _normed_bank)),
    "the mixture banked instead of the sum": (K3, code(DecoderLayer, "forward", _mixture_goes_on)),
    "the sum goes on over a block's border": (K3, code(MixedStream, "open_block", _sum_goes_on)),
    "normed sources mixed": (K3, code(attn_res, "mix", _normed_values)),
    "a temperature in the mixture": (K3, code(attn_res, "mix", _with_a_temperature)),
    "the last bank entry ignored": (K3, code(attn_res, "mix", _last_slot_reused)),
    "no mixture before the final norm": (K3, decoder(_no_mixture_at_the_end)),
    "blocks of another size": (K3, config(attn_res_block_size=3)),
}
"""Each with the models that can have it."""


NONE: Final[dict[str, tuple[tuple[str, ...], Change]]] = {
    "weights before the down projection": (BOTH, code(torch_kernels, "experts_sum", _weight_before_down)),
}
"""Changes that are the same in exact arithmetic: they must not be taken for mistakes."""
