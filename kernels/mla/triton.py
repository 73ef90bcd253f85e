"""Absorbed multi-head latent attention in Triton, reading pages where they lie.

Rows of any kind (decoded, prompt, replayed) take one path. Keys are cut into splits of 512 at absolute multiples.
Within a split, pages come in ascending order, with a running maximum; splits are folded in ascending order:

    s = (q . key) scale log2(e)    m' = max(m, max s)    p = 2^(s - m')
    A = A 2^(m - m') + p V         l = l 2^(m - m') + p 1          (p rounded to the pages' dtype)
    M' = max(M, m)   N = N 2^(M - M') + A 2^(m - M')   D = D 2^(M - M') + l 2^(m - M')    ctx = N / D

A page or split without a key for a row leaves the row's numbers as they are: its maximum is -inf, so both factors
are exactly 1 and 0, and what is added is 0. Row sums come from the same MMA as the values. Hence a row's bits depend
on its own query and keys alone, not on the rows of its block, nor on how far those reach.

| argument | dtype | shape |
| --- | --- | --- |
| q (absorbed) | bf16 or fp32, contiguous | [R, Hq, r + dr] |
| pages | that of q; any stride between pages | [P, 64, r + dr] |
| result | fp32 | [R, Hq, r] |
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.kernels.elementwise import LOG2_E
from forkpoint.kernels.mla.work import Plan, Work, plan
from forkpoint.limits import PAGE_TOKENS, SPLIT_TOKENS

WORKSPACE_BYTES: Final = 512 << 20
"""Partial results of one launch; longer batches take several."""
RANK_MAX: Final = {torch.bfloat16: 512, torch.float32: 128}
"""Latent width that one program's accumulators and pages in flight leave room for."""
ROPE_MAX: Final = 64


@triton.jit
def split_kernel(
    q, pages, tables, sequences, items, partial, maxima, sums, scale, page_stride,
    HEADS: tl.constexpr, R: tl.constexpr, DR: tl.constexpr, BLOCK: tl.constexpr,
    PAGE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One block of (token, head) rows over one split of keys: A [BLOCK, R], m and l [BLOCK], all fp32."""
    item = tl.program_id(0).to(tl.int64)
    sequence = sequences + tl.load(items + item * 3).to(tl.int64) * 4
    block = tl.load(items + item * 3 + 1)
    split = tl.load(items + item * 3 + 2)
    first_row = tl.load(sequence)
    rows = tl.load(sequence + 1).to(tl.int32)
    start = tl.load(sequence + 2).to(tl.int32)
    table = tables + tl.load(sequence + 3)
    end = start + rows
    place = block * BLOCK + tl.arange(0, BLOCK)
    inside = place < rows * HEADS
    position = start + place // HEADS
    last = tl.minimum(start + (block * BLOCK + BLOCK - 1) // HEADS, end - 1)
    width: tl.constexpr = R + DR
    latent_column = tl.arange(0, R)
    rope_column = R + tl.arange(0, DR)
    row = q + (first_row * HEADS + place)[:, None] * width
    q_latent = tl.load(row + latent_column[None, :], mask=inside[:, None], other=0.0)
    q_rope = tl.load(row + rope_column[None, :], mask=inside[:, None], other=0.0)
    ones = tl.full((PAGE, 16), 1.0, dtype=q.dtype.element_ty)
    m = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK, 16), dtype=tl.float32)
    attended = tl.zeros((BLOCK, R), dtype=tl.float32)
    page_end = tl.minimum((split + 1) * (SPLIT // PAGE), last // PAGE + 1)
    page_first = split * (SPLIT // PAGE)
    # A page's number is read one step ahead: loads that wait for a load of their own step are not pipelined.
    number = tl.load(table + page_first).to(tl.int64)
    for page in range(page_first, page_end):
        base = pages + number * page_stride
        number = tl.load(table + tl.minimum(page + 1, page_end - 1)).to(tl.int64)
        key = page * PAGE + tl.arange(0, PAGE)
        # Places without a token were never written: what lies there must not even meet a 0.
        present = (key < end)[:, None]
        line = base + tl.arange(0, PAGE)[:, None] * width
        latent = tl.load(line + latent_column[None, :], mask=present, other=0.0)
        rope = tl.load(line + rope_column[None, :], mask=present, other=0.0)
        score = tl.dot(q_latent, tl.trans(latent), input_precision="ieee")
        score = tl.dot(q_rope, tl.trans(rope), score, input_precision="ieee") * scale
        score = tl.where(key[None, :] <= position[:, None], score, float("-inf"))
        highest = tl.maximum(m, tl.max(score, axis=1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        decay = tl.exp2(m - finite)
        weight = tl.exp2(score - finite[:, None]).to(q.dtype.element_ty)
        m = highest
        total = tl.dot(weight, ones, total * decay[:, None], input_precision="ieee")
        attended = tl.dot(weight, latent, attended * decay[:, None], input_precision="ieee")
    out = item * BLOCK + tl.arange(0, BLOCK)
    tl.store(partial + out[:, None] * R + latent_column[None, :], attended)
    tl.store(maxima + out, m)
    tl.store(sums + out, tl.max(total, axis=1))  # all columns are equal


@triton.jit
def combine_kernel(
    partial, maxima, sums, blocks, sequences, out,
    HEADS: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Folds the splits of LANES rows of a block, ascending: one split takes the same steps as many."""
    block = blocks + (tl.program_id(0) // (BLOCK // LANES)).to(tl.int64) * 4
    lane = tl.program_id(0) % (BLOCK // LANES) * LANES + tl.arange(0, LANES)
    sequence = sequences + tl.load(block).to(tl.int64) * 4
    place = tl.load(block + 1) * BLOCK + lane
    line = tl.load(block + 2).to(tl.int64) * BLOCK + lane
    splits = tl.load(block + 3)
    column = tl.arange(0, R)
    top = tl.load(maxima + line)
    numerator = tl.load(partial + line[:, None] * R + column[None, :])
    denominator = tl.load(sums + line)
    for _ in range(1, splits):
        line += BLOCK
        m = tl.load(maxima + line)
        highest = tl.maximum(top, m)
        before, now = tl.exp2(top - highest), tl.exp2(m - highest)
        attended = tl.load(partial + line[:, None] * R + column[None, :])
        numerator = numerator * before[:, None] + attended * now[:, None]
        denominator = denominator * before + tl.load(sums + line) * now
        top = highest
    # + 0.0: what is equal as a number must be equal as bytes. Places beyond the sequence are of no row.
    row = tl.load(sequence) * HEADS + place
    inside = place < tl.load(sequence + 1).to(tl.int32) * HEADS
    tl.store(out + row[:, None] * R + column[None, :], numerator / denominator[:, None] + 0.0, mask=inside[:, None])


@triton.jit
def write_kernel(latents, pages, places, page_stride, width, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """One row to its place: places int64 [R] = page * PAGE + row of the page."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    column = tl.arange(0, BLOCK)
    value = tl.load(latents + row * width + column, mask=column < width)
    target = pages + (place // PAGE) * page_stride + (place % PAGE) * width + column
    tl.store(target, value.to(pages.dtype.element_ty), mask=column < width)


@dataclass(frozen=True)
class Shape:
    """Of the split kernel: (token, head) rows of a block, warps that hold its accumulators, loads in flight."""

    rows: int
    warps: int
    stages: int


SHAPES: Final = (Shape(16, 4, 3), Shape(32, 8, 3), Shape(64, 8, 2), Shape(16, 4, 2), Shape(32, 8, 2))
"""Shapes that compile for sm_90 without spills at r = 512; the last two keep one page in flight and fit twice."""
COMBINE_LANES: Final = 8
"""Rows that one program folds; elementwise, so free to choose."""
COMBINE_WARPS: Final = 8


def shape_for(heads: int, dtype: torch.dtype = torch.bfloat16) -> Shape:
    """The pinned shape, from the model alone: from 64 rows on the products are wgmma. Not yet timed.

    fp32 pages are there for tests: their products take no tensor core, and larger blocks spill.
    """
    if dtype == torch.float32:
        return SHAPES[0]
    return SHAPES[0] if heads < 32 else SHAPES[1] if heads < 64 else SHAPES[2]


def why_not(q: Tensor, pages: Tensor, r: int) -> str | None:
    """Why `paged_mla` does not take a call, or None."""
    if q.dim() != 3 or pages.dim() != 3 or q.shape[2] != pages.shape[2]:
        return f"q {tuple(q.shape)} and pages {tuple(pages.shape)} are not [R, Hq, D] and [P, 64, D]"
    if pages.shape[1] != PAGE_TOKENS:
        return f"a page has {pages.shape[1]} rows, not {PAGE_TOKENS}"
    if q.dtype != pages.dtype or q.dtype not in (torch.bfloat16, torch.float32):
        return f"q is {q.dtype}, pages {pages.dtype}: both must be bf16, or both fp32"
    for name, size, most in (("r", r, RANK_MAX[q.dtype]), ("dr", q.shape[2] - r, ROPE_MAX)):
        if size < 16 or size > most or size & (size - 1):
            return f"{name} is {size}, not a power of two from 16 to {most} ({q.dtype})"
    if pages.stride(2) != 1 or pages.stride(1) != pages.shape[2]:
        return "the rows of a page are not contiguous"
    return None


def _planned(
    page_tables: list[list[int]], cu_seqlens: list[int], starts: list[int], heads: int, r: int, rows: int,
    workspace: int, device: torch.device,
) -> Plan:  # fmt: skip
    tables = tuple(tuple(table) for table in page_tables)
    items = max(1, workspace // (4 * rows * (r + 2)))
    return plan(tables, tuple(cu_seqlens), tuple(starts), heads, rows, items, device)


def paged_mla(
    q: Tensor,
    pages: Tensor,
    page_tables: list[list[int]],
    r: int,
    scale: float,
    cu_seqlens: list[int],
    starts: list[int],
    shape: Shape | None = None,
    workspace: int = WORKSPACE_BYTES,
) -> Tensor:
    """Causal attention of packed rows over their sequences' pages: q [R, Hq, r + dr] absorbed -> ctx [R, Hq, r], fp32.

    Arguments as in kernels/mla/naive.py; the rows' own latents already lie in pages. `shape` and `workspace` override
    the pinned values, for tests and tuning. Raises ValueError with `why_not`'s reason, or when a table is too short.
    """
    if reason := why_not(q, pages, r):
        raise ValueError(reason)
    rows, heads, _ = q.shape
    out = torch.empty((rows, heads, r), dtype=torch.float32, device=q.device)
    chosen = shape or shape_for(heads, q.dtype)
    planned = _planned(page_tables, cu_seqlens, starts, heads, r, chosen.rows, workspace, q.device)
    lines = planned.items_max * chosen.rows
    partial = torch.empty((lines, r), dtype=torch.float32, device=q.device)
    scalars = torch.empty((2, lines), dtype=torch.float32, device=q.device)
    q = q.contiguous()
    for work in planned.launches:
        _launch(q, pages, planned, work, partial, scalars, out, chosen, scale * LOG2_E)
    return out


def _launch(
    q: Tensor, pages: Tensor, planned: Plan, work: Work, partial: Tensor, scalars: Tensor, out: Tensor,
    shape: Shape, scale: float,
) -> None:  # fmt: skip
    heads, r = out.shape[1:]
    block = shape.rows
    split_kernel[(work.items.shape[0],)](
        q, pages, planned.tables, planned.sequences, work.items, partial, scalars[0], scalars[1],
        scale, pages.stride(0), HEADS=heads, R=r, DR=q.shape[2] - r, BLOCK=block, PAGE=PAGE_TOKENS,
        SPLIT=SPLIT_TOKENS, num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False,
    )  # fmt: skip
    combine_kernel[(work.blocks.shape[0] * (block // COMBINE_LANES),)](
        partial, scalars[0], scalars[1], work.blocks, planned.sequences, out, HEADS=heads, R=r, BLOCK=block,
        LANES=COMBINE_LANES, num_warps=COMBINE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


def write_latents(
    latents: Tensor, pages: Tensor, page_tables: list[list[int]], cu_seqlens: list[int], starts: list[int]
) -> None:
    """Stores latents [R, r + dr] of packed rows in their pages, [P, 64, r + dr]; writes no other place.

    Rounds to the pages' dtype. Raises ValueError when the widths differ or a page's rows are not contiguous.
    """
    rows, width = latents.shape
    if pages.shape[1:] != (PAGE_TOKENS, width) or pages.stride(2) != 1 or pages.stride(1) != width:
        raise ValueError(f"pages {tuple(pages.shape)} do not take contiguous rows of {width}")
    if not rows:
        return
    places = [
        page_tables[n][t // PAGE_TOKENS] * PAGE_TOKENS + t % PAGE_TOKENS
        for n, start in enumerate(starts)
        for t in range(start, start + cu_seqlens[n + 1] - cu_seqlens[n])
    ]
    write_kernel[(rows,)](
        latents.contiguous(), pages, torch.tensor(places, dtype=torch.int64, device=pages.device), pages.stride(0),
        width, PAGE=PAGE_TOKENS, BLOCK=triton.next_power_of_2(width), num_warps=1,
    )  # fmt: skip
