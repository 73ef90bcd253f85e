"""What kernel tests share: comparison of bytes, operands at odd addresses, poisoned pools, and KDA inputs."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from forkpoint.kernels.elementwise import GATE_ONE, sigmoid, silu
from forkpoint.kernels.kda.naive import OpenRows, kda_gate, recurrent_kda, tile_kda
from forkpoint.kernels.matmul.naive import bmm_fixed
from forkpoint.kernels.norm.naive import l2_norm

POISON_GATE = -(2**31) + 7
GATES: dict[str, float | None] = {"bounded": -5.0, "softplus": None}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """torch.equal on the bytes: NaN equals the same NaN, and -0 differs from 0."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8)


def at_offset(x: Tensor, items: int) -> Tensor:
    """A contiguous copy that begins `items` values after an aligned address."""
    room = x.new_empty(x.numel() + items)
    place = room[items:].view(x.shape)
    place.copy_(x)
    return place


def negative_zeros(a: Tensor, b: Tensor) -> Tensor:
    """A batched product whose zeros are all negative."""
    product = bmm_fixed(a, b)
    return torch.where(product == 0, -0.0, product)


def relative_rmse(a: Tensor, reference: Tensor) -> float:
    """Root mean square of the difference over that of the reference."""
    return float((a.double() - reference).square().mean().sqrt() / reference.square().mean().sqrt())


@dataclass(frozen=True)
class KdaInputs:
    """Row-wise inputs of one sequence, and its state at position 0."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    initial_state: Tensor
    lower_bound: float | None

    @property
    def tokens(self) -> int:
        return self.q.shape[0]

    def reference(self) -> tuple[Tensor, Tensor]:
        """The fp64 recurrence: o [T, H, V] and S [H, V, K]."""
        log_decay = self.g.double() * (math.log(2.0) / GATE_ONE)
        q, k, v = self.q.double(), self.k.double(), self.v.double()
        return recurrent_kda(q, k, v, log_decay, self.beta.double(), self.initial_state.double())


def kda_inputs(
    tokens: int,
    heads: int,
    keys: int,
    values: int,
    lower_bound: float | None,
    *,
    z: Tensor | None = None,
    A_log: Tensor | None = None,
    repeated_keys: bool = False,
) -> KdaInputs:
    """Random inputs as a layer would make them; z [T, H, K] and A_log [H] may be given, dt_bias is then 0."""
    noise = 0.02 if repeated_keys else 1.0
    common = torch.randn(1, heads, keys) if repeated_keys else torch.zeros(1, heads, keys)
    gates = torch.randn(tokens, heads, keys) * 2 if z is None else z
    dt_bias = torch.randn(heads, keys) if z is None else torch.zeros(heads, keys)
    rates = torch.rand(heads) if A_log is None else A_log
    return KdaInputs(
        q=l2_norm(silu(torch.randn(tokens, heads, keys))) * keys**-0.5,
        k=l2_norm(silu(torch.randn(tokens, heads, keys) * noise + common)),
        v=torch.randn(tokens, heads, values),
        g=kda_gate(gates, rates, dt_bias, lower_bound),
        beta=sigmoid(torch.randn(tokens, heads) + (3.0 if repeated_keys else 0.0)),
        initial_state=torch.randn(heads, values, keys) * 0.1,
        lower_bound=lower_bound,
    )


@dataclass(frozen=True)
class KdaPool:
    """A poisoned pool of slots."""

    S: Tensor
    rows: OpenRows

    def clone(self) -> "KdaPool":
        rows = self.rows
        return KdaPool(self.S.clone(), OpenRows(rows.k.clone(), rows.v.clone(), rows.g.clone(), rows.beta.clone()))

    def parts(self) -> tuple[Tensor, ...]:
        return self.S, self.rows.k, self.rows.v, self.rows.g, self.rows.beta


def kda_pool(slots: int, heads: int, keys: int, values: int) -> KdaPool:
    nan = float("nan")
    return KdaPool(
        S=torch.full((slots, heads, values, keys), nan),
        rows=OpenRows(
            k=torch.full((slots, 16, heads, keys), nan),
            v=torch.full((slots, 16, heads, values), nan),
            g=torch.full((slots, 16, heads, keys), POISON_GATE, dtype=torch.int32),
            beta=torch.full((slots, 16, heads), nan),
        ),
    )


def feed(pool: KdaPool, pieces: list[tuple[int, KdaInputs, int, int]]) -> list[Tensor]:
    """One packed call: (slot, inputs, start, end) for each sequence; returns each one's o."""
    cu_seqlens = [0]
    for _, _, start, end in pieces:
        cu_seqlens.append(cu_seqlens[-1] + end - start)

    def packed(name: str) -> Tensor:
        return torch.cat([getattr(inputs, name)[start:end] for _, inputs, start, end in pieces])

    o = tile_kda(
        packed("q"),
        packed("k"),
        packed("v"),
        packed("g"),
        packed("beta"),
        pool.S,
        pool.rows,
        [slot for slot, *_ in pieces],
        cu_seqlens,
        [start for _, _, start, _ in pieces],
        pieces[0][1].lower_bound,
    )
    return list(torch.split(o, [end - start for _, _, start, end in pieces]))


def feed_alone(inputs: KdaInputs, cuts: list[int], slot: int = 1, slots: int = 3) -> tuple[Tensor, KdaPool]:
    """One sequence cut into pieces of the given lengths, in a pool of its own; returns all of o and the pool."""
    pool = kda_pool(slots, inputs.q.shape[1], inputs.q.shape[2], inputs.v.shape[2])
    pool.S[slot] = inputs.initial_state
    outputs: list[Tensor] = []
    position = 0
    for length in cuts:
        outputs += feed(pool, [(slot, inputs, position, position + length)])
        position += length
    return torch.cat(outputs), pool
