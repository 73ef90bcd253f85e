"""flash-linear-attention's calls as its users make them: norms, gate and beta in the kernel, states values first."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.kda_cases import D, Inputs
from benchmarks.kernels.run import Call


def bounds_of(lengths: list[int], device: torch.device) -> Tensor:
    return torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], device=device)


def _in_kernel(inputs: Inputs) -> dict[str, Any]:
    weights = inputs.weights
    return {
        "A_log": weights.A_log,
        "dt_bias": weights.dt_bias.flatten(),
        "lower_bound": weights.lower_bound,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "state_v_first": True,
    }


def _parts(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """x as three tensors, as separate projections give them."""
    rows, heads = inputs.b.shape
    q, k, v = (inputs.x.view(rows, 3, heads, D)[None, :, i].contiguous() for i in range(3))
    return q, k, v


def chunk(inputs: Inputs, lengths: list[int]) -> Call:
    """chunk_kda over packed rows, x taken for the conv's output."""
    parts, act = _parts(inputs), _chunk(inputs, lengths)
    return lambda: act(*parts)


def _chunk(inputs: Inputs, lengths: list[int]) -> Callable[[Tensor, Tensor, Tensor], object]:
    from fla.ops.kda import chunk_kda

    rows, heads = inputs.b.shape
    options = _in_kernel(inputs) | {
        "initial_state": torch.zeros(len(lengths), heads, D, D, device=inputs.x.device),
        "output_final_state": True,
        "safe_gate": inputs.weights.lower_bound is not None,
        "cu_seqlens": bounds_of(lengths, inputs.x.device) if len(lengths) > 1 else None,
    }
    z, b = inputs.z.view(1, rows, heads, D), inputs.b[None]

    def call(q: Tensor, k: Tensor, v: Tensor) -> object:
        with torch.no_grad():
            return chunk_kda(q, k, v, z, b, **options)

    return call


def conv_and_chunk(inputs: Inputs, lengths: list[int]) -> Call:
    """causal_conv1d with SiLU on q, k and v, then chunk_kda."""
    from fla.modules.causal_conv1d import causal_conv1d

    rows, heads = inputs.b.shape
    bounds = bounds_of(lengths, inputs.x.device) if len(lengths) > 1 else None
    raw = [part.reshape(1, rows, heads * D) for part in _parts(inputs)]
    taps = inputs.weights.conv.to(inputs.x.dtype).t().contiguous().view(3, heads * D, 4)
    act = _chunk(inputs, lengths)

    def call() -> object:
        with torch.no_grad():
            mixed = [
                causal_conv1d(part, weight, activation="silu", output_final_state=True, cu_seqlens=bounds)[0]
                for part, weight in zip(raw, taps, strict=True)
            ]
        q, k, v = (part.view(1, rows, heads, D) for part in mixed)
        return act(q, k, v)

    return call


def recurrent(inputs: Inputs, pool: Tensor, slots: list[list[int]]) -> list[Call]:
    """fused_recurrent_kda_fwd on one token of each slot; moves the pool's states on in place."""
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    batch, heads = len(slots[0]), inputs.heads
    first = Inputs(inputs.x[:batch], inputs.z[:batch], inputs.b[:batch], inputs.weights)
    q, k, v = _parts(first)
    z, b = first.z.view(1, batch, heads, D), first.b[None]
    bounds = torch.arange(batch + 1, device=pool.device)

    def step(chosen: list[int]) -> Callable[[], object]:
        options = _in_kernel(inputs) | {
            "initial_state": pool,
            "inplace_final_state": True,
            "cu_seqlens": bounds,
            "ssm_state_indices": torch.tensor(chosen, device=pool.device),
            "out": torch.empty_like(v),
        }
        return lambda: fused_recurrent_kda_fwd(q, k, v, z, b, **options)

    return [step(chosen) for chosen in slots]
