"""Attention of many blocks over one sequence's pages: page by page, all blocks of a pass at once."""

from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.matmul.naive import BLOCK_ROWS, bmm_fixed
from forkpoint.kernels.mla.blocks import SPLIT_PAGES, Blocks
from forkpoint.limits import PAGE_TOKENS, SPLIT_TOKENS

PASS_BYTES: Final = 8 << 20
"""Bounds the blocks of one pass: their scores of a split and their partial sums stay in the last-level cache."""
ONES_COLUMNS: Final = 16
"""Row sums are a product with ones; of a narrower one the bits would depend on memory alignment."""


def row_ones(p: Tensor) -> Tensor:
    """Sums of rows p [B, 16, 64] -> [B, 16, 1] as a product of fixed shape."""
    ones = p.new_ones((1, PAGE_TOKENS, ONES_COLUMNS)).expand(p.shape[0], -1, -1)
    return bmm_fixed(p, ones)[..., :1]


def finite_max(m: Tensor) -> Tensor:
    """A maximum to subtract: 0 for rows without a key, whose scores are all -inf."""
    return torch.where(m == -torch.inf, 0.0, m)


def _split(q: Tensor, keys: Tensor, positions: Tensor, first_key: int, r: int, scale: float) -> tuple[Tensor, ...]:
    """m [B, 16, 1], A [B, 16, r] and l [B, 16, 1] of one split.

    q [B, 16, D], keys [pages, 64, D] of which the first is at position first_key, positions [B, 16].
    """
    pages, blocks = keys.shape[0], q.shape[0]
    scores = q.new_empty((pages, blocks, BLOCK_ROWS, PAGE_TOKENS))
    for page in range(pages):
        scores[page] = bmm_fixed(q, keys[page].t().expand(blocks, -1, -1))
    scores *= scale
    if first_key + pages * PAGE_TOKENS > int(positions.min()):
        key = torch.arange(pages * PAGE_TOKENS, device=q.device).add_(first_key).view(pages, 1, 1, PAGE_TOKENS)
        scores.masked_fill_(key > positions[None, :, :, None], -torch.inf)
    m = scores.amax(dim=3, keepdim=True).amax(dim=0)
    scores.sub_(finite_max(m)).exp_()
    sums = row_ones(scores.view(pages * blocks, BLOCK_ROWS, PAGE_TOKENS)).view(pages, blocks, BLOCK_ROWS, 1)
    attended = bmm_fixed(scores[0], keys[0, :, :r].expand(blocks, -1, -1))
    total = sums[0]
    for page in range(1, pages):
        attended += bmm_fixed(scores[page], keys[page, :, :r].expand(blocks, -1, -1))
        total = total + sums[page]
    return m, attended, total


def shared_attention(q: Tensor, positions: Tensor, blocks: Blocks, pages: Tensor, r: int, scale: float) -> Tensor:
    """Attention of one sequence's blocks: q [B, 16, D], positions [B, 16], pages [P, 64, D] -> [B, 16, r]."""
    splits = -(-blocks.pages // SPLIT_PAGES)
    at_once = max(1, PASS_BYTES // (4 * BLOCK_ROWS * (SPLIT_TOKENS + splits * r)))
    out = q.new_empty((blocks.count, BLOCK_ROWS, r))
    table = torch.tensor(blocks.table, dtype=torch.int64, device=q.device)
    for first in range(0, blocks.count, at_once):
        now = slice(first, min(first + at_once, blocks.count))
        seen = min(int(positions[now].max()) + 1, blocks.end)
        parts: list[tuple[Tensor, ...]] = []
        for first_page in range(0, -(-seen // PAGE_TOKENS), SPLIT_PAGES):
            last_page = min(first_page + SPLIT_PAGES, -(-seen // PAGE_TOKENS))
            keys = pages[table[first_page:last_page]]
            # Places without a token were never written: what lies there must not even meet a 0.
            keys.view(-1, keys.shape[2])[max(0, blocks.end - first_page * PAGE_TOKENS) :] = 0.0
            parts.append(_split(q[now], keys, positions[now], first_page * PAGE_TOKENS, r, scale))
        highest = torch.stack([m for m, _, _ in parts]).amax(dim=0)
        weight = (parts[0][0] - highest).exp_()
        numerator, denominator = parts[0][1] * weight, parts[0][2] * weight
        for m, attended, total in parts[1:]:
            weight = (m - highest).exp_()
            numerator += attended * weight
            denominator = denominator + total * weight
        out[now] = numerator / denominator
    return out
