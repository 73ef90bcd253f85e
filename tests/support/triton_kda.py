"""What tests of the Triton KDA kernels share: a layer's inputs, a poisoned pool, packed calls, and the fp64 answer."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forkpoint.kernels.conv.naive import causal_conv
from forkpoint.kernels.elementwise import sigmoid
from forkpoint.kernels.kda.naive import OpenRows, kda_gate, recurrent_kda, tile_kda
from forkpoint.kernels.kda.triton.launch import PINNED, KdaState, KdaWeights, OpenFactors, Shapes, decode, prefill
from forkpoint.kernels.kda.triton.plan import decode_facts, prefill_plan
from forkpoint.kernels.norm.naive import l2_norm
from tests.support.kernels import POISON_GATE

D = 128
SHAPES = replace(PINNED, recur_values=128, recur_warps=8, read_values=128, read_warps=8)
"""Few programs: each costs the interpreter tens of milliseconds."""


@dataclass(frozen=True)
class Layer:
    """Inputs of one sequence, [T, ...], and S at position 0."""

    x: Tensor
    z: Tensor
    b: Tensor
    weights: KdaWeights
    initial: Tensor

    @property
    def heads(self) -> int:
        return self.b.shape[1]

    @property
    def device(self) -> torch.device:
        return self.x.device


def layer_inputs(
    tokens: int, heads: int, lower_bound: float | None, device: torch.device, weights: KdaWeights | None = None
) -> Layer:
    """Random inputs in bf16, as projections would give them; z is wide, so that many gates are near their floor."""
    rates = torch.rand(heads) * (2.7 if lower_bound is None else 1.0)
    made = KdaWeights(
        conv=(torch.randn(4, 3 * heads * D) * 0.5).to(device),
        A_log=rates.to(device),
        dt_bias=torch.randn(heads, D).to(device),
        lower_bound=lower_bound,
    )
    return Layer(
        x=torch.randn(tokens, 3 * heads * D).bfloat16().to(device),
        z=(torch.randn(tokens, heads * D) * 3).bfloat16().to(device),
        b=torch.randn(tokens, heads).bfloat16().to(device),
        weights=weights or made,
        initial=(torch.randn(heads, D, D) * 0.1).to(device),
    )


def poisoned_state(slots: int, heads: int, device: torch.device, pool: torch.dtype = torch.float32) -> KdaState:
    """Slots full of NaN (gates: an integer that no sum survives)."""

    def nan(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.full((slots, *shape), math.nan, dtype=dtype, device=device)

    opened = OpenFactors.empty(slots, heads, device)
    for tensor in vars(opened).values():
        tensor.fill_(POISON_GATE if tensor.dtype == torch.int32 else math.nan)
    return KdaState(
        S=nan(heads, D, D, dtype=pool),
        opened=opened,
        conv_ring=nan(4, 3 * heads * D),
        conv_grid=nan(3, 3 * heads * D),
    )


def tensors_of(state: KdaState) -> tuple[Tensor, ...]:
    return state.S, *vars(state.opened).values(), state.conv_ring, state.conv_grid


def start_slot(state: KdaState, slot: int, layer: Layer) -> None:
    """Put a sequence at position 0 into a slot; all but S stays poisoned."""
    state.S[slot] = layer.initial.to(state.S.dtype)


Piece = tuple[int, Layer, int, int]
"""Slot, inputs, first and last + 1 position."""


def _packed(pieces: list[Piece]) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.cat([layer.x[start:end] for _, layer, start, end in pieces])
    z = torch.cat([layer.z[start:end] for _, layer, start, end in pieces])
    b = torch.cat([layer.b[start:end] for _, layer, start, end in pieces])
    return x, z, b


def feed_prefill(
    state: KdaState,
    pieces: list[Piece],
    checkpoints: Tensor | None = None,
    at: dict[tuple[int, int], int] | None = None,
    shapes: Shapes = SHAPES,
) -> list[Tensor]:
    """One packed prefill; returns each piece's o."""
    lengths = [end - start for _, _, start, end in pieces]
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    layer = pieces[0][1]
    plan = prefill_plan([p[0] for p in pieces], bounds, [p[2] for p in pieces], layer.device, at)
    o = prefill(*_packed(pieces), layer.weights, state, plan, checkpoints, shapes)
    return list(torch.split(o, lengths))


def feed_decode(state: KdaState, tokens: list[tuple[int, Layer, int]], shapes: Shapes | None = SHAPES) -> Tensor:
    """One decode step of (slot, inputs, position), in the shapes of a call without any for None; o [N, H, 128]."""
    layer = tokens[0][1]
    facts = decode_facts([t[0] for t in tokens], [t[2] for t in tokens], layer.device)
    packed = _packed([(slot, inputs, position, position + 1) for slot, inputs, position in tokens])
    return decode(*packed, layer.weights, state, facts, shapes)


def clone_state(state: KdaState) -> KdaState:
    opened = OpenFactors(**{name: tensor.clone() for name, tensor in vars(state.opened).items()})
    return KdaState(state.S.clone(), opened, state.conv_ring.clone(), state.conv_grid.clone())


def feed_moved(state: KdaState, slot: int, layer: Layer, start: int, end: int, to: int) -> Tensor:
    """Rows start:end of a sequence as if they began at position `to`."""
    plan = prefill_plan([slot], [0, end - start], [to], layer.device)
    return prefill(*_packed([(slot, layer, start, end)]), layer.weights, state, plan, None, SHAPES)


def fp64_answer(layer: Layer, tokens: int) -> tuple[Tensor, Tensor]:
    """o [tokens, H, 128] and the state after them, all in fp64 by the recurrence (gates on their 2^-22 grid)."""
    heads, weights = layer.heads, layer.weights
    x = torch.cat((torch.zeros(3, layer.x.shape[1], dtype=torch.float64), layer.x[:tokens].double().cpu()))
    taps = weights.conv.double().cpu()
    mixed = sum((x[i : i + tokens] * taps[i] for i in range(4)), torch.zeros(()))
    mixed = (mixed * torch.sigmoid(mixed)).view(tokens, 3, heads, D)
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (mixed[:, 0], mixed[:, 1]))
    z = layer.z[:tokens].float().cpu().view(tokens, heads, D)
    gates = kda_gate(z, weights.A_log.cpu(), weights.dt_bias.cpu(), weights.lower_bound)
    beta = torch.sigmoid(layer.b[:tokens].double().cpu())
    decay = gates.double() * (math.log(2.0) / 2**22)
    return recurrent_kda(q * D**-0.5, k, mixed[:, 2], decay, beta, layer.initial.double().cpu())


def twin_answer(layer: Layer, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o, S, conv ring and grid tail from the plain-torch twins in fp32, one sequence in slot 0."""
    heads, weights = layer.heads, layer.weights
    state = poisoned_state(1, heads, torch.device("cpu"))
    ring, grid = state.conv_ring.float(), state.conv_grid.float()
    start_slot(state, 0, layer)
    bounds: tuple[list[int], list[int], list[int]] = [0], [0, tokens], [0]
    mixed = causal_conv(layer.x[:tokens].float().cpu(), weights.conv.t().contiguous().cpu(), ring, grid, *bounds)
    mixed = mixed.view(tokens, 3, heads, D)
    rows = torch.full((1, 16, heads, D), math.nan)
    opened = OpenRows(rows, rows.clone(), torch.full_like(rows, POISON_GATE, dtype=torch.int32), rows[..., 0].clone())
    z = layer.z[:tokens].float().cpu().view(tokens, heads, D)
    o = tile_kda(
        l2_norm(mixed[:, 0]) * D**-0.5,
        l2_norm(mixed[:, 1]),
        mixed[:, 2].contiguous(),
        kda_gate(z, weights.A_log.cpu(), weights.dt_bias.cpu(), weights.lower_bound),
        sigmoid(layer.b[:tokens].float().cpu()),
        state.S,
        opened,
        *bounds,
        weights.lower_bound,
    )
    return o, state.S[0], ring[0], grid[0]
