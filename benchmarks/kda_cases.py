"""Inputs and checks of the KDA benchmark: layers as projections would feed them, slots in use, fp64 answers."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from forkpoint.kernels.kda.naive import kda_gate, recurrent_kda
from forkpoint.kernels.kda.triton.launch import PINNED, KdaState, KdaWeights, OpenFactors, Shapes, decode, prefill
from forkpoint.kernels.kda.triton.plan import decode_facts, prefill_plan

D = 128
GATES: dict[str, float | None] = {"bounded": -5.0, "softplus": None}


@dataclass(frozen=True)
class Inputs:
    """x [T, 3 H 128], z [T, H 128], b [T, H], all bf16, and a layer's weights."""

    x: Tensor
    z: Tensor
    b: Tensor
    weights: KdaWeights

    @property
    def heads(self) -> int:
        return self.b.shape[1]

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.x[first:last], self.z[first:last], self.b[first:last]


def make_inputs(tokens: int, heads: int, lower_bound: float | None, device: torch.device) -> Inputs:
    """Random rows on `device`."""

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16)

    weights = KdaWeights(
        conv=torch.randn(4, 3 * heads * D, device=device) * 0.5,
        A_log=torch.rand(heads, device=device) * (1.0 if lower_bound else 2.7),
        dt_bias=torch.randn(heads, D, device=device),
        lower_bound=lower_bound,
    )
    return Inputs(noise(tokens, 3 * heads * D), noise(tokens, heads * D) * 2, noise(tokens, heads), weights)


def make_state(slots: int, heads: int, device: torch.device, pool: torch.dtype = torch.float32) -> KdaState:
    """Slots that hold plausible open rows at every place, so that a decode step may begin anywhere."""

    def noise(*shape: int) -> Tensor:
        return torch.randn((slots, *shape), device=device, dtype=torch.bfloat16)

    return KdaState(
        S=(noise(heads, D, D) * 0.1).to(pool),
        opened=OpenFactors(
            left=noise(16, heads, D) * D**-0.5,
            right=noise(16, heads, D) * D**-0.5,
            v=noise(16, heads, D),
            beta=torch.rand(slots, 16, heads, device=device),
            total=-torch.randint(0, 1 << 24, (slots, heads, D), device=device, dtype=torch.int32),
            reference=torch.zeros((slots, heads, D), device=device, dtype=torch.int32),
        ),
        conv_ring=noise(4, 3 * heads * D),
        conv_grid=noise(3, 3 * heads * D),
    )


def variants() -> Iterator[tuple[str, Shapes]]:
    """Block shapes that a tuned table might choose; each must give the pinned shapes' bits."""
    yield "pinned", PINNED
    yield "prepare and step, 2 warps", replace(PINNED, prepare_warps=2, step_warps=2)
    for values, warps, stages in ((64, 4, 2), (64, 4, 4), (128, 8, 3), (32, 4, 3), (32, 2, 3)):
        name = f"recur BV {values}, {warps} warps, {stages} stages"
        yield name, replace(PINNED, hopper=False, recur_values=values, recur_warps=warps, recur_stages=stages)
    yield "hopper, 3 stages", replace(PINNED, hopper_stages=3)
    for values, warps in ((32, 2), (32, 4), (128, 8)):
        yield f"read BV {values}, {warps} warps", replace(PINNED, read_values=values, read_warps=warps)


def prefill_then_decode(inputs: Inputs, prompt: int, shapes: Shapes) -> tuple[Tensor, Tensor]:
    """o of all rows and the final S [H, 128, 128], the rows after `prompt` decoded one by one; starts from zeros."""
    device, tokens = inputs.x.device, inputs.x.shape[0]
    state = make_state(2, inputs.heads, device)
    state.S.zero_()
    out = []
    if prompt:
        plan = prefill_plan([1], [0, prompt], [0], device)
        out.append(prefill(*inputs.rows(0, prompt), inputs.weights, state, plan, None, shapes))
    for position in range(prompt, tokens):
        facts = decode_facts([1], [position], device)
        out.append(decode(*inputs.rows(position, position + 1), inputs.weights, state, facts, shapes))
    return torch.cat(out), state.S[1]


def fp64_answer(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """o and S by the recurrence in fp64 on the same device; the number of tokens must be a multiple of 16."""
    tokens, heads, weights = inputs.x.shape[0], inputs.heads, inputs.weights
    before = torch.zeros(3, inputs.x.shape[1], dtype=torch.float64, device=inputs.x.device)
    x, taps = torch.cat((before, inputs.x.double())), weights.conv.double()
    mixed = x[:tokens] * taps[0] + x[1 : tokens + 1] * taps[1] + x[2 : tokens + 2] * taps[2]
    mixed = mixed + x[3:] * taps[3]
    mixed = (mixed * torch.sigmoid(mixed)).view(tokens, 3, heads, D)
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (mixed[:, 0], mixed[:, 1]))
    gate = kda_gate(inputs.z.float().view(tokens, heads, D), weights.A_log, weights.dt_bias, weights.lower_bound)
    decay, beta = gate.double() * (math.log(2.0) / 2**22), torch.sigmoid(inputs.b.double())
    zero = torch.zeros(heads, D, D, dtype=torch.float64, device=inputs.x.device)
    return recurrent_kda(q * D**-0.5, k, mixed[:, 2], decay, beta, zero)


def relative(a: Tensor, reference: Tensor) -> float:
    return float((a.double() - reference).norm() / reference.norm())
