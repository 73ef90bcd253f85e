"""Absorbed attention over pages: decode at a long context in several batches, and one chunk of a prompt."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.run import COPY_BYTES_A_US, FLOP_A_US, OURS, Call, Case, Rows, Run, copies, equal, off, timed
from benchmarks.record import Measurement
from forkpoint.kernels.mla.triton import launch as mla
from forkpoint.limits import PAGE_TOKENS

RANK, ROPE = 512, 64
CONTEXT = 32768
SHAPES = ((64, 1), (16, 1), (128, 1), (1, 1), (1, 512))
"""Sequences, and rows of each."""
PREDICTED = {(96, 1, 512): "partial results of the splits add 20-25 % to a prompt's attention"}


def floor_us(heads: int, batch: int, tokens: int) -> float:
    """The longer of reading the latents once and of both products."""
    flop = 2 * batch * tokens * heads * CONTEXT * (2 * RANK + ROPE)
    return max(batch * CONTEXT * (RANK + ROPE) * 2 / COPY_BYTES_A_US, flop / FLOP_A_US)


def equality(run: Run, heads: int) -> Rows:
    """A prompt's last rows cut at odd places, alone and packed; places without a token are poison."""
    heads, end, tail = (4, 80, 3) if run.dry else (heads, 5000, 40)
    rank, rope = (16, 16) if run.dry else (RANK, ROPE)
    width, scale = rank + rope, (rank + rope) ** -0.5
    pages = run.random(-(-end // PAGE_TOKENS), PAGE_TOKENS, width)
    table = list(range(pages.shape[0]))[::-1]
    pages[table[-1], end % PAGE_TOKENS :] = torch.nan
    first, q = end - tail, run.random(tail, heads, width)

    def attend(spans: list[tuple[int, int]]) -> Tensor:
        bounds = [0]
        for a, b in spans:
            bounds.append(bounds[-1] + b - a)
        rows = torch.cat([q[a - first : b - first] for a, b in spans])
        step = mla.plan([table] * len(spans), bounds, [a for a, _ in spans], run.device, heads, rank, q.dtype)
        return mla.paged_mla(rows, pages, step, rank, scale)

    case = f"mla H{heads}"
    whole = attend([(first, end)])
    yield Measurement(case, "finite", "equal", float(whole.isfinite().all()), target=1.0)
    cut = [(first, first + 1), (first + 1, end - 1), (end - 1, end)]
    yield equal(case, "cut alone", [(torch.cat([attend([span]) for span in cut]), whole)])
    yield equal(case, "cut packed", [(attend(cut), whole)])
    keys = torch.cat([pages[page] for page in table])[:end].double()
    weights = torch.softmax(q[-1].double() @ keys.T * scale, dim=1)
    yield Measurement(case, "against fp64", "error", off(whole[-1], weights @ keys[:, :rank]))


def plain(q: Tensor, keys: Tensor, rank: int, scale: float) -> Tensor:
    """The same attention by cuBLAS over latents that lie side by side: q [B, H, D], keys [B, T, D]."""
    weights = torch.softmax(torch.bmm(q, keys.transpose(1, 2)).float() * scale, dim=-1).to(q.dtype)
    return torch.bmm(weights, keys[:, :, :rank])


def times(run: Run, heads: int, batch: int, tokens: int) -> Rows:
    """One batch; pages in random order, several sets of them when one would stay in the L2 cache."""
    case = f"mla H{heads} context {CONTEXT} batch {batch} x {tokens}"
    floor, context, rank, rope = floor_us(heads, batch, tokens), CONTEXT, RANK, ROPE
    predicted = PREDICTED.get((heads, batch, tokens))
    if run.dry:
        heads, context, rank, rope, batch, tokens = 4, 65, 16, 16, min(batch, 2), 1
    width, each = rank + rope, -(-context // PAGE_TOKENS)
    sets = copies(batch * context * width * 2)
    pages = run.random((1 if run.dry else sets) * batch * each, PAGE_TOKENS, width)
    order = torch.randperm(pages.shape[0], generator=torch.Generator().manual_seed(1)).tolist()
    q = run.random(batch * tokens, heads, width)
    ours: list[Call] = []
    for first in range(0, len(order), batch * each):
        tables = [order[first + n * each : first + (n + 1) * each] for n in range(batch)]
        bounds, starts = [n * tokens for n in range(batch + 1)], [context - tokens] * batch
        step = mla.plan(tables, bounds, starts, run.device, heads, rank, q.dtype)
        ours.append(partial(mla.paged_mla, q, pages, step, rank, width**-0.5))
    contenders = {OURS: ours}
    if tokens == 1:
        keys = pages.view(-1, each * PAGE_TOKENS, width)[:, :context]
        contenders["torch bmm, pages gathered"] = [
            partial(plain, q, keys[n : n + batch], rank, width**-0.5) for n in range(0, len(keys), batch)
        ]
    found = run.compare(contenders)
    peer = ("torch bmm, pages gathered", found.get("torch bmm, pages gathered"))
    yield timed(case, "a layer", found[OURS], peer, floor, floor / 0.8, predicted=predicted)


def cases(run: Run) -> list[Case]:
    """K3's heads and Kimi Linear's."""
    return [
        *((f"mla H{heads}", partial(equality, run, heads)) for heads in (96, 32)),
        *((f"mla H{h} {b} x {t}", partial(times, run, h, b, t)) for b, t in SHAPES for h in (96, 32)),
    ]
