"""The lowest key of each row that passes its filters, out of the list of keys that the filters' kernels collect.

A list is short where the filters' bounds are near, as they mostly are: then it is sorted. A long one (a flat row, a row
of equal logits) is halved until the interval holds the edge, on counts for top-k, on masses for top-p. Keys are unique
and masses are integers, so both give the same key.
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.kernels.filters.triton import (
    BINS,
    NO_THRESHOLD,
    PARTS_A_PROGRAM,
    WARPS,
    Call,
    collect_kernel,
    count_kernel,
    filter_mass,
    load_limits,
    load_scale,
    load_tops,
    load_total,
    mass_limit,
    value_of,
)

SHORT: Final = 1024
"""Keys of a list that is sorted."""
BLOCK: Final = 4096
"""Keys of a long list that are looked at together."""
RESOLVE_WARPS: Final = 16
NO_KEY = tl.constexpr((1 << 63) - 1)


@triton.jit
def load_masses(key, highest, scale, least):
    """Masses of listed keys, which hold their logits."""
    return filter_mass(value_of(((key >> 24) - 2147483648).to(tl.int32)), highest, scale, least)


@triton.jit
def lowest_of_short(keys, count, k, p, total, before, highest, scale, least, SHORT: tl.constexpr):
    """The lowest passing key of a list that fits SHORT. For top-p alone, `before` is the mass of better tokens."""
    rank = tl.arange(0, SHORT)
    key = tl.sort(tl.load(keys + rank, mask=rank < count, other=-1), descending=True)
    kept = (rank < count) & ((k == 0) | (rank < k))
    if p < 1.0:
        share = tl.where(kept, load_masses(key, highest, scale, least), 0)
        if k > 0:
            total = tl.sum(share, axis=0)
        kept = kept & (before + tl.cumsum(share, axis=0) - share < mass_limit(total, p))
    return tl.min(tl.where(kept, key, NO_KEY), axis=0)


@triton.jit
def above(keys, count, edge, highest, scale, least, BLOCK: tl.constexpr):
    """(number, mass, lowest) of the listed keys at or above an edge."""
    number = tl.zeros((), dtype=tl.int64)
    mass = tl.zeros((), dtype=tl.int64)
    lowest = tl.full((), NO_KEY, dtype=tl.int64)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=-1)
        here = (place < count) & (key >= edge)
        number += tl.sum(here.to(tl.int64), axis=0)
        mass += tl.sum(tl.where(here, load_masses(key, highest, scale, least), 0), axis=0)
        lowest = tl.minimum(lowest, tl.min(tl.where(here, key, NO_KEY), axis=0))
    return number, mass, lowest


@triton.jit
def ends_of(keys, count, BLOCK: tl.constexpr):
    """(lowest listed key, one more than the highest)."""
    lowest = tl.full((), NO_KEY, dtype=tl.int64)
    highest = tl.full((), -1, dtype=tl.int64)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        lowest = tl.minimum(lowest, tl.min(tl.load(keys + place, mask=place < count, other=NO_KEY), axis=0))
        highest = tl.maximum(highest, tl.max(tl.load(keys + place, mask=place < count, other=-1), axis=0))
    return lowest, highest + 1


@triton.jit
def lowest_of_long(keys, count, k, p, total, before, highest, scale, least, BLOCK: tl.constexpr):
    """The same of a list of any length."""
    passing, end = ends_of(keys, count, BLOCK)
    if k > 0:
        low = passing
        high = end
        while high - low > 1:
            edge = low + (high - low) // 2
            number, _mass, _key = above(keys, count, edge, highest, scale, least, BLOCK)
            if number >= k:
                low = edge
            else:
                high = edge
            if number == k:
                high = edge + 1
        # A listed key, not the edge below it: tokens that are not listed lie lower.
        _number, total, passing = above(keys, count, low, highest, scale, least, BLOCK)
    if p < 1.0:
        limit = mass_limit(total, p) - before
        low = passing
        high = end
        below = count.to(tl.int64)
        beyond = tl.zeros((), dtype=tl.int64)
        # Keys at or above `low` hold the limit or more, those at or above `high` less: one key between is the edge.
        while (high - low > 1) & (below - beyond > 1):
            edge = low + (high - low) // 2
            number, heavier, _lowest = above(keys, count, edge, highest, scale, least, BLOCK)
            if heavier >= limit:
                low = edge
                below = number
            else:
                high = edge
                beyond = number
        _count, _total, passing = above(keys, count, low, highest, scale, least, BLOCK)
    return passing


@triton.jit
def resolve_kernel(
    tops, temperature, top_k, top_p, min_p, mass, listed, keys, sure, threshold, vocabulary, parts, programs,
    BLOCK: tl.constexpr, SHORT: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The lowest key of each row that passes top-k, then top-p on the mass that is left: int64 [B]."""
    row = tl.program_id(0).to(tl.int64)
    scale = load_scale(temperature, row)
    k, p, filters = load_limits(top_k, top_p, row, scale, vocabulary)
    passing = tl.full((), NO_THRESHOLD, dtype=tl.int64)
    if filters:
        _tops, highest = load_tops(tops, row, parts, PARTS)
        least = tl.load(min_p + row).to(tl.float32)
        count = tl.load(listed + row)
        keys += row * vocabulary
        total = tl.zeros((), dtype=tl.int64)
        before = tl.zeros((), dtype=tl.int64)
        if k == 0:
            total = load_total(mass, row, programs, PROGRAMS)
            before = load_total(sure, row, programs, PROGRAMS)
        if count <= SHORT:
            passing = lowest_of_short(keys, count, k, p, total, before, highest, scale, least, SHORT)
        else:
            passing = lowest_of_long(keys, count, k, p, total, before, highest, scale, least, BLOCK)
    tl.store(threshold + row, passing)


def threshold(call: Call) -> Tensor:
    """Lowest filter key that passes top-k, then top-p on the mass left: int64 [B]."""
    (batch, vocabulary), rows, device = call.logits.shape, call.rows, call.logits.device
    # Counts and the list's length start at 0: one tensor, one fill.
    zeros = torch.zeros(batch * (BINS + 1), dtype=torch.int32, device=device)
    counts, listed = zeros[batch:], zeros[:batch]
    keys = torch.empty((batch, vocabulary), dtype=torch.int64, device=device)
    bounds, passing = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    mass, sure = (torch.empty((batch, call.programs), dtype=torch.int64, device=device) for _ in range(2))
    filters = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    found, sizes = (counts, mass, bounds), (*call.sizes, call.programs)
    cut = {"PARTS": triton.next_power_of_2(call.parts), "enable_fp_fusion": False}
    summed = {"PROGRAMS": triton.next_power_of_2(call.programs)}
    walk = cut | {"BLOCK": call.block, "GROUP": PARTS_A_PROGRAM, "BINS": BINS, "num_warps": WARPS}
    count_kernel[call.grid](call.logits, call.tops, *filters, *found, *sizes, **walk)
    collect_kernel[call.grid](call.logits, call.tops, *filters, *found, listed, keys, sure, *sizes, **walk, **summed)
    resolve_kernel[(batch,)](
        call.tops, *filters, mass, listed, keys, sure, passing, vocabulary, call.parts, call.programs,
        BLOCK=BLOCK, SHORT=SHORT, num_warps=RESOLVE_WARPS, **cut, **summed,
    )  # fmt: skip
    return passing
