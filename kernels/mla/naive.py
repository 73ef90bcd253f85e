"""Absorbed multi-head latent attention over pages of latents.

All heads share one key a token, latent [r] beside raw key [dr]; the value is the latent. Per query row, with splits
of 512 keys at absolute multiples and pages of 64 inside them:

    s = (q . key) scale      m_j = max over split j      p = exp(s - m_j)
    A_j = sum over pages of p V      l_j = sum over pages of p 1      pages ascending
    w_j = exp(m_j - max m)      ctx = (sum_j w_j A_j) / (sum_j w_j l_j)      splits ascending

Maxima are exact in any order; every sum is a product of fixed shape (16 query rows, one page) or an ascending
elementwise sum, and a page or split without a key for a row adds 0 to it. So a row's bits depend on its own query
and keys alone. Query rows lie in blocks by absolute position (blocks.py). shared.py serves sequences with many
blocks (prefill), ragged.py those with few (decode): the same arithmetic in another loop order.
"""

from functools import lru_cache

import torch
from torch import Tensor

from forkpoint.kernels.matmul.naive import BLOCK_ROWS
from forkpoint.kernels.mla.blocks import block_plan
from forkpoint.kernels.mla.ragged import ragged_attention
from forkpoint.kernels.mla.shared import shared_attention
from forkpoint.limits import PAGE_TOKENS


def _tuples(page_tables: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(table) for table in page_tables)


def paged_mla(
    q: Tensor,
    pages: Tensor,
    page_tables: list[list[int]],
    r: int,
    scale: float,
    cu_seqlens: list[int],
    starts: list[int],
) -> Tensor:
    """Causal attention of packed rows over their sequences' pages: q [R, Hq, r + dr] absorbed -> ctx [R, Hq, r], fp32.

    pages [P, 64, r + dr] is one layer's view of the pool (any stride between pages), already holding the latents of
    these rows. Position t of sequence n lies in page page_tables[n][t // 64] at t % 64; sequence n owns rows
    cu_seqlens[n]:cu_seqlens[n+1] and starts at position starts[n]. Places without a token are never read as
    numbers. Raises ValueError when a table is too short.
    """
    rows, heads, width = q.shape
    if rows == 0:
        return q.new_empty((0, heads, r))
    plan = block_plan(_tuples(page_tables), tuple(cu_seqlens), tuple(starts), heads, q.device)
    blocks = q.new_zeros((plan.blocks * BLOCK_ROWS, width))
    blocks.index_copy_(0, plan.rows, q.reshape(-1, width))
    blocks = blocks.view(plan.blocks, BLOCK_ROWS, width)
    out = q.new_empty((plan.blocks, BLOCK_ROWS, r))
    for item in plan.shared:
        own = slice(item.first, item.first + item.count)
        out[own] = shared_attention(blocks[own], plan.positions[own], item, pages, r, scale)
    if plan.ragged:
        order, attended = ragged_attention(blocks, plan.positions, plan.ragged, pages, r, scale)
        out[order] = attended
    # + 0.0: what is equal as a number must be equal as bytes.
    return out.view(-1, r).index_select(0, plan.rows).add_(0.0).view(rows, heads, r)


@lru_cache(maxsize=8)
def _places(
    tables: tuple[tuple[int, ...], ...], cu_seqlens: tuple[int, ...], starts: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    positions = [(n, starts[n] + row) for n in range(len(tables)) for row in range(cu_seqlens[n + 1] - cu_seqlens[n])]
    page = torch.tensor([tables[n][t // PAGE_TOKENS] for n, t in positions], dtype=torch.int64, device=device)
    place = torch.tensor([t % PAGE_TOKENS for _, t in positions], dtype=torch.int64, device=device)
    return page, place


def write_latents(
    latents: Tensor, pages: Tensor, page_tables: list[list[int]], cu_seqlens: list[int], starts: list[int]
) -> None:
    """Stores latents [R, r + dr] of packed rows in their pages, [P, 64, r + dr]; writes no other place."""
    page, place = _places(_tuples(page_tables), tuple(cu_seqlens), tuple(starts), latents.device)
    pages[page, place] = latents
