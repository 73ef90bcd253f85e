"""Paged attention on a GPU at its limits: a context of 2^20 tokens, pools beyond 2^31 values, poison everywhere."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests.support.gpu import require_gpu

require_gpu()

from forkpoint.kernels.mla.triton import launch as mla
from forkpoint.limits import PAGE_TOKENS
from tests.support.kernels import relative_rmse, same_bytes

R, DR = 512, 64
WIDTH = R + DR
SCALE = 1 / math.sqrt(192)
LAYERS = 2
POOL_PAGES = (1 << 31) // (LAYERS * PAGE_TOKENS * WIDTH) + 500
LENGTHS = (1 << 20, 1, 37, 64, 65, 4095, 4096, 4097, 20000)
"""The first reaches the end of the longest context; others end around pages and splits."""


@dataclass(frozen=True)
class Context:
    """Latents [T, 576] of one sequence in scattered pages, and queries [Q, heads, 576] of its last Q rows."""

    latents: Tensor
    table: list[int]
    q: Tensor

    @property
    def length(self) -> int:
        return self.latents.shape[0]


def contexts(heads: int, device: torch.device) -> tuple[Tensor, list[Context]]:
    """A pool of NaN [pages, 64, 576], one layer of two, with every context written into it; they use the last pages."""
    pool = torch.full((POOL_PAGES, LAYERS, PAGE_TOKENS, WIDTH), math.nan, dtype=torch.bfloat16, device=device)
    ids = list(range(POOL_PAGES))
    random.Random(3).shuffle(ids)
    ids.remove(POOL_PAGES - 1)
    ids.append(POOL_PAGES - 1)
    made = []
    for length in reversed(LENGTHS):
        pages = -(-length // PAGE_TOKENS)
        table, ids = ids[-pages:], ids[:-pages]
        latents = torch.randn((length, WIDTH), device=device).bfloat16()
        # Without heads: rows to be written alone, no attention of a million rows is planned.
        mla.write_latents(latents, pool[:, 1], mla.plan([table], [0, length], [0], device))
        rows = min(length, 20)
        made.append(Context(latents, table, (torch.randn((rows, heads, WIDTH), device=device) * 2).bfloat16()))
    return pool, made[::-1]


def attend(pool: Tensor, spans: list[tuple[Context, int, int]]) -> list[Tensor]:
    """One packed call: rows first:last of each context, counted from the first that has a query."""
    q = torch.cat([context.q[first:last] for context, first, last in spans])
    bounds = [0]
    for _, first, last in spans:
        bounds.append(bounds[-1] + last - first)
    starts = [context.length - context.q.shape[0] + first for context, first, _ in spans]
    plan = mla.plan([context.table for context, _, _ in spans], bounds, starts, pool.device, q.shape[1])
    out = mla.paged_mla(q, pool[:, 1], plan, R, SCALE)
    return list(torch.split(out, [last - first for _, first, last in spans]))


def exact(context: Context, row: int, heads: int) -> Tensor:
    """Attention of one row's first heads in fp64: [heads, R]."""
    keys = context.latents[: context.length - context.q.shape[0] + row + 1].double()
    return torch.softmax(context.q[row, :heads].double() @ keys.T * SCALE, dim=1) @ keys[:, :R]


@pytest.mark.parametrize("heads", [96, 32])
def test_rows_of_a_million_tokens_are_exact_alone_and_in_any_batch(device: torch.device, heads: int) -> None:
    pool, made = contexts(heads, device)
    whole = attend(pool, [(context, 0, context.q.shape[0]) for context in made])
    for context, rows in zip(made, whole, strict=True):
        assert rows.isfinite().all()
        last = context.q.shape[0] - 1
        assert relative_rmse(rows[last, :4], exact(context, last, 4)) < 5e-3, context.length
    # Decoded rows beside a prompt's piece, a sequence without a row, and the others' last rows.
    spans = [(made[0], 3, 11), (made[1], 0, 0)]
    spans += [(context, context.q.shape[0] - 1, context.q.shape[0]) for context in made[2:]]
    for (context, first, end), o in zip(spans, attend(pool, spans), strict=True):
        index = next(i for i, one in enumerate(made) if one is context)
        assert same_bytes(o, whole[index][first:end]), context.length
    for context, rows in zip(made, whole, strict=True):
        for row in range(0, context.q.shape[0], 7):
            assert same_bytes(attend(pool, [(context, row, row + 1)])[0], rows[row : row + 1]), (context.length, row)


def test_latents_reach_the_last_page_and_no_other_place(device: torch.device) -> None:
    pool = torch.full((POOL_PAGES, LAYERS, PAGE_TOKENS, WIDTH), math.nan, dtype=torch.bfloat16, device=device)
    latents = torch.randn((5, WIDTH), device=device).bfloat16()
    plan = mla.plan([[0, POOL_PAGES - 1]], [0, 5], [64 + 30], device, 96)
    mla.write_latents(latents, pool[:, 1], plan)
    assert same_bytes(pool[-1, 1, 30:35], latents)
    pool[-1, 1, 30:35] = math.nan
    assert bool(pool.isnan().all())
