"""Short causal convolution over packed sequences, with a live ring of inputs and a tail at the last grid point.

y[t] = silu(w[0] x[t-3] + w[1] x[t-2] + w[2] x[t-1] + w[3] x[t]) per channel, x = 0 before the start; products and
sums are elementwise and in that order.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.elementwise import silu
from forkpoint.limits import TILE_TOKENS

WIDTH: Final = 4
HISTORY: Final = WIDTH - 1


@dataclass(frozen=True)
class _Plan:
    """Index tensors of one batch. "Extended rows": per sequence its 3 inputs before `start`, then its new rows."""

    history_slots: Tensor
    """[3 N] slot of each history row."""
    history_places: Tensor
    """[3 N] place of it in the ring."""
    before_start: Tensor | None
    """[3 N, 1] bool, True where the position is negative; None where none is."""
    order: Tensor | None
    """[R + 3 N] extended rows from cat(history, x); None where they are that already (one sequence)."""
    new_rows: Tensor
    """[R] new rows among the convolved rows (extended row e gives convolved row e - 3)."""
    ring: tuple[Tensor, Tensor, Tensor]
    """Slot, place and extended row of every input that the ring keeps."""
    grid: tuple[Tensor, Tensor, Tensor] | None
    """Slot, place and extended row of every input that a grid tail keeps; None where no tile closes."""


@lru_cache(maxsize=8)
def _plan(slots: tuple[int, ...], cu_seqlens: tuple[int, ...], starts: tuple[int, ...], device: torch.device) -> _Plan:
    if len(set(slots)) != len(slots):
        raise ValueError(f"two sequences share a slot: {list(slots)}")
    history: list[tuple[int, int]] = []
    before: list[bool] = []
    order: list[int] = []
    new_rows: list[int] = []
    ring: list[tuple[int, int, int]] = []
    grid: list[tuple[int, int, int]] = []
    live = [n for n in range(len(slots)) if cu_seqlens[n + 1] > cu_seqlens[n]]
    for number, n in enumerate(live):
        first, length, start = cu_seqlens[n], cu_seqlens[n + 1] - cu_seqlens[n], starts[n]
        extended = len(order)  # extended row of position start - 3
        history += [(slots[n], position % WIDTH) for position in range(start - HISTORY, start)]
        before += [position < 0 for position in range(start - HISTORY, start)]
        order += range(HISTORY * number, HISTORY * (number + 1))
        order += range(HISTORY * len(live) + first, HISTORY * len(live) + first + length)
        new_rows += range(extended, extended + length)
        end = start + length
        origin = extended + HISTORY - start
        ring += [(slots[n], t % WIDTH, origin + t) for t in range(max(start, end - WIDTH), end)]
        closed = end // TILE_TOKENS * TILE_TOKENS
        if closed > start:
            grid += [(slots[n], i, origin + closed - HISTORY + i) for i in range(HISTORY)]

    def index(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def columns(rows: list[tuple[int, int, int]]) -> tuple[Tensor, Tensor, Tensor]:
        return index([r[0] for r in rows]), index([r[1] for r in rows]), index([r[2] for r in rows])

    return _Plan(
        history_slots=index([h[0] for h in history]),
        history_places=index([h[1] for h in history]),
        before_start=torch.tensor(before, device=device)[:, None] if any(before) else None,
        order=index(order) if len(live) > 1 else None,
        new_rows=index(new_rows),
        ring=columns(ring),
        grid=columns(grid) if grid else None,
    )


def causal_conv(
    x: Tensor,
    weight: Tensor,
    ring: Tensor,
    grid: Tensor,
    slots: list[int],
    cu_seqlens: list[int],
    starts: list[int],
) -> Tensor:
    """Convolves packed rows and moves both tails on: x [R, C] -> silu(conv) [R, C], fp32.

    weight [C, 4], tap 3 multiplies the current token. ring [slots, 4, C]: the input of position t lies at t % 4;
    read for the three positions before each start (negative ones count as 0 and are not read), written for the last
    four new ones. grid [slots, 3, C]: the inputs of positions s-3..s-1 in order, written when the tile that ends at
    s closes. Sequence n owns rows cu_seqlens[n]:cu_seqlens[n+1], starts at position starts[n] and lives in
    slots[n]; slots must differ.
    """
    if x.shape[0] == 0:
        return torch.empty_like(x)
    plan = _plan(tuple(slots), tuple(cu_seqlens), tuple(starts), x.device)
    history = ring[plan.history_slots, plan.history_places]
    if plan.before_start is not None:
        history = history.masked_fill_(plan.before_start, 0.0)
    extended = torch.cat((history, x))
    if plan.order is not None:
        extended = extended.index_select(0, plan.order)
    rows = extended.shape[0] - HISTORY
    taps = weight.t().contiguous()
    y = extended[:rows] * taps[0]
    for tap in range(1, WIDTH):
        y += extended[tap : tap + rows] * taps[tap]
    if plan.order is not None:
        y = y.index_select(0, plan.new_rows)
    slot, place, row = plan.ring
    ring[slot, place] = extended.index_select(0, row)
    if plan.grid is not None:
        slot, place, row = plan.grid
        grid[slot, place] = extended.index_select(0, row)
    return silu(y)
