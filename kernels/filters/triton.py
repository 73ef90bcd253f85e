"""Where the filters of the sampler end: one threshold key a row, from which tokens are kept.

A key orders tokens as the twin does: by logit, the lower id first among equals. Counts and masses are integers, so no
order of adding, no split of a row and no order of the list of keys changes a bit.

1. `highest_kernel`: the maximum of each part of a row.
2. `count_kernel`: how many tokens lie in each of 256 bins below the row's maximum, and the row's mass.
3. `collect_kernel`: the keys of the bins in which a filter may end, as a list, and the mass before them.
4. `resolve_kernel`: halves an interval of keys until it holds the edge, on counts for top-k, on masses for top-p.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.kernels.elementwise import LN2, LOG2_E
from forkpoint.kernels.sampler import naive
from forkpoint.kernels.sampler.naive import SamplingRows

PARTS_A_PROGRAM: Final = 4
WARPS: Final = 4
RESOLVE_BLOCK: Final = 4096
"""Keys that `resolve_kernel` looks at together."""
BINS: Final = 256
"""Of `bins_of`. tl.histogram works on every bin for every 32 tokens: 2048 bins took 570 us for 64 rows."""
ID_BITS: Final = 24
VOCABULARY_MAX: Final = 1 << ID_BITS

LN_2 = tl.constexpr(LN2)
LOG_2_E = tl.constexpr(LOG2_E)
INVERSE_MAX = tl.constexpr(naive.INVERSE_MAX)
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
NO_THRESHOLD = tl.constexpr(-(1 << 63))


@triton.jit
def ordered(x):
    """int32 in the order of fp32, and back: the map is its own inverse on the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_clean(logits, row, part, row_stride, vocabulary, BLOCK: tl.constexpr):
    """(token ids, fp32 logits) of a part: NaN as -inf, +inf as the largest fp32, -0 as 0."""
    token = part * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("-inf"), value)
    value = tl.where(value > FP32_MAX, FP32_MAX, value)
    return token, tl.where(value == 0.0, 0.0, value)


@triton.jit
def value_of(order):
    """fp32 of an ordered int32."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def load_tops(tops, row, parts, PARTS: tl.constexpr):
    """(ordered maxima of a row's parts [PARTS], the row's maximum, 0 where no logit is finite)."""
    part = tl.arange(0, PARTS)
    top = tl.load(tops + row * parts + part, mask=part < parts, other=-2139095041)  # -inf in the order
    highest = value_of(tl.max(top, axis=0))
    return top, tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def load_scale(temperature, row):
    """log2(e) / temperature as fp32, negative for a greedy row."""
    heat = tl.load(temperature + row).to(tl.float64)
    inverse = tl.minimum(1.0 / tl.where(heat <= 0.0, 1.0, heat) * LOG_2_E, INVERSE_MAX)
    return tl.where(heat <= 0.0, -1.0, inverse.to(tl.float32))


@triton.jit
def filter_key(value, token):
    """Unique non-negative int64 of 56 bits in the order of logits; at equality the lower id has the larger key."""
    return ((ordered(value).to(tl.int64) + 2147483648) << 24) | (16777215 - token).to(tl.int64)


@triton.jit
def filter_mass(value, highest, scale, least):
    """int64 mass of tokens for top-p, 2^32 for the most likely one; 0 below min-p."""
    weight = tl.exp((value - highest) * scale * LN_2)
    return tl.where(weight >= least, (weight * 4294967296.0).to(tl.int64), 0)


@triton.jit
def highest_kernel(logits, tops, row_stride, vocabulary, parts, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Ordered maximum of each part of a row: int32 [B, parts]."""
    row = tl.program_id(0).to(tl.int64)
    for index in tl.static_range(GROUP):
        part = tl.program_id(1) * GROUP + index
        _, value = load_clean(logits, row, part, row_stride, vocabulary, BLOCK)
        tl.store(tops + row * parts + part, tl.max(ordered(value), axis=0), mask=part < parts)


@triton.jit
def bins_of(value, highest):
    """Number of a token's bin, 8 a nat below the row's maximum: int32, the last one for all that is farther off."""
    return tl.minimum((highest - value) * 8.0, 255.0).to(tl.int32)


@triton.jit
def load_limits(top_k, top_p, row, scale, vocabulary):
    """(k or 0, p, whether the row filters at all)."""
    k = tl.load(top_k + row).to(tl.int64)
    k = tl.where((k > 0) & (k < vocabulary), k, 0)
    p = tl.load(top_p + row).to(tl.float64)
    return k, p, (scale >= 0.0) & ((k > 0) | (p < 1.0))


@triton.jit
def mass_limit(total, p):
    """Mass that the tokens above a kept one stay below. At least 1: the most likely token is always kept."""
    return tl.maximum(tl.floor(total.to(tl.float64) * p).to(tl.int64), 1)


@triton.jit
def load_total(mass, row, programs, PROGRAMS: tl.constexpr):
    """Sum of the programs' masses."""
    program = tl.arange(0, PROGRAMS)
    return tl.sum(tl.load(mass + row * programs + program, mask=program < programs, other=0), axis=0)


@triton.jit
def count_kernel(
    logits, tops, temperature, top_k, top_p, min_p, counts, mass, row_stride, vocabulary, parts, programs,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Tokens in each bin, int32 [B, BINS], and the mass of each program, int64 [B, programs]."""
    row = tl.program_id(0).to(tl.int64)
    scale = load_scale(temperature, row)
    _, _p, filters = load_limits(top_k, top_p, row, scale, vocabulary)
    if filters:
        _tops, highest = load_tops(tops, row, parts, PARTS)
        least = tl.load(min_p + row).to(tl.float32)
        total = tl.zeros((), dtype=tl.int64)
        number = tl.zeros((BINS,), dtype=tl.int32)
        for index in range(GROUP):
            part = tl.program_id(1) * GROUP + index
            token, value = load_clean(logits, row, part, row_stride, vocabulary, BLOCK)
            inside = token < vocabulary
            number += tl.histogram(bins_of(value, highest), BINS, mask=inside)
            total += tl.sum(tl.where(inside, filter_mass(value, highest, scale, least), 0), axis=0)
        tl.atomic_add(counts + row * BINS + tl.arange(0, BINS), number, mask=number > 0, sem="relaxed")
        tl.store(mass + row * programs + tl.program_id(1), total)


@triton.jit
def uncertain_bins(number, k, p, total, scale, least, BINS: tl.constexpr):
    """(first, last) bin that may hold a filter's edge.

    top-k: all bins up to the one in which the k-th token lies. top-p: bounds of each bin's mass, from its number of
    tokens and the weights at its edges, with room for the rounding of fp32 sums, leave out bins before and after.
    """
    if k > 0:
        first = 0
        last = tl.sum((tl.cumsum(number, axis=0) < k).to(tl.int32), axis=0)
    else:
        limit = mass_limit(total, p)
        spare = (total - limit).to(tl.float32) * 0.999
        goal = limit.to(tl.float32)
        edge = tl.arange(0, BINS).to(tl.float32) * -0.125
        heaviest = tl.exp(edge * scale * LN_2) * 1.001
        lightest = tl.exp((edge - 0.125) * scale * LN_2) * 0.999
        most = tl.where(heaviest < least, 0.0, heaviest * 4294967296.0) * number.to(tl.float32)
        some = tl.where(lightest < least, 0.0, tl.maximum(lightest * 4294967296.0 - 1.0, 0.0))
        some = tl.where(tl.arange(0, BINS) == BINS - 1, 0.0, some) * number.to(tl.float32)
        first = tl.sum((tl.cumsum(most, axis=0) * 1.001 < goal * 0.999).to(tl.int32), axis=0)
        reached = tl.sum((tl.cumsum(some, axis=0) * 0.999 < goal * 1.001).to(tl.int32), axis=0)
        spared = tl.sum((tl.cumsum(most, axis=0, reverse=True) * 1.001 > spare).to(tl.int32), axis=0) - 1
        last = tl.maximum(tl.minimum(reached, spared), first)
    return first, last


@triton.jit
def collect_kernel(
    logits, tops, temperature, top_k, top_p, min_p, counts, mass, listed, keys, sure, row_stride, vocabulary, parts,
    programs, BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, BINS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Appends the keys of a program's tokens in uncertain bins to the row's list; `sure` is the mass before those."""
    row = tl.program_id(0).to(tl.int64)
    scale = load_scale(temperature, row)
    k, p, filters = load_limits(top_k, top_p, row, scale, vocabulary)
    if filters:
        _tops, highest = load_tops(tops, row, parts, PARTS)
        least = tl.load(min_p + row).to(tl.float32)
        number = tl.load(counts + row * BINS + tl.arange(0, BINS))
        total = load_total(mass, row, programs, PROGRAMS)
        first_bin, last_bin = uncertain_bins(number, k, p, total, scale, least, BINS)
        before = tl.zeros((), dtype=tl.int64)
        for index in range(GROUP):
            part = tl.program_id(1) * GROUP + index
            token, value = load_clean(logits, row, part, row_stride, vocabulary, BLOCK)
            bins = bins_of(value, highest)
            share = filter_mass(value, highest, scale, least)
            before += tl.sum(tl.where((token < vocabulary) & (bins < first_bin), share, 0), axis=0)
            wanted = ((token < vocabulary) & (bins >= first_bin) & (bins <= last_bin)).to(tl.int32)
            place = tl.cumsum(wanted, axis=0) - 1
            found = tl.sum(wanted, axis=0)
            if found > 0:
                start = tl.atomic_add(listed + row, found, sem="relaxed")
                tl.store(keys + row * vocabulary + start + place, filter_key(value, token), mask=wanted > 0)
        tl.store(sure + row * programs + tl.program_id(1), before)


@triton.jit
def above(keys, count, edge, highest, scale, least, BLOCK: tl.constexpr):
    """(number, mass, lowest) of the listed keys at or above an edge."""
    number = tl.zeros((), dtype=tl.int64)
    mass = tl.zeros((), dtype=tl.int64)
    lowest = tl.full((), 9223372036854775807, dtype=tl.int64)
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        key = tl.load(keys + place, mask=place < count, other=-1)
        here = (place < count) & (key >= edge)
        value = value_of(((key >> 24) - 2147483648).to(tl.int32))
        number += tl.sum(here.to(tl.int64), axis=0)
        mass += tl.sum(tl.where(here, filter_mass(value, highest, scale, least), 0), axis=0)
        lowest = tl.minimum(lowest, tl.min(tl.where(here, key, 9223372036854775807), axis=0))
    return number, mass, lowest


@triton.jit
def resolve_kernel(
    tops, temperature, top_k, top_p, min_p, mass, listed, keys, sure, threshold, vocabulary, parts, programs,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr,
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
        end = ((ordered(highest).to(tl.int64) + 2147483648) << 24) + 16777216
        total = load_total(mass, row, programs, PROGRAMS)
        before = load_total(sure, row, programs, PROGRAMS)
        if k > 0:
            low = tl.zeros((), dtype=tl.int64)
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
            before = tl.zeros((), dtype=tl.int64)
        if p < 1.0:
            limit = mass_limit(total, p) - before
            low = tl.maximum(passing, 0)
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
    tl.store(threshold + row, passing)


@dataclass(frozen=True)
class Call:
    """One call: its operands, and how a row is cut."""

    logits: Tensor
    rows: SamplingRows
    tops: Tensor
    block: int

    @property
    def parts(self) -> int:
        return triton.cdiv(self.logits.shape[1], self.block)  # type: ignore[no-any-return]

    @property
    def programs(self) -> int:
        return triton.cdiv(self.parts, PARTS_A_PROGRAM)  # type: ignore[no-any-return]

    @property
    def grid(self) -> tuple[int, int]:
        return self.logits.shape[0], self.programs

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.logits.stride(0), self.logits.shape[1], self.parts


def begin(logits: Tensor, rows: SamplingRows, block: int) -> Call:
    """The call's parts with their maxima."""
    parts = triton.cdiv(logits.shape[1], block)
    tops = torch.empty((logits.shape[0], parts), dtype=torch.int32, device=logits.device)
    call = Call(logits, rows, tops, block)
    highest_kernel[call.grid](logits, tops, *call.sizes, BLOCK=block, GROUP=PARTS_A_PROGRAM, num_warps=WARPS)
    return call


def threshold(call: Call) -> Tensor:
    """Lowest filter key that passes top-k, then top-p on the mass left: int64 [B]."""
    (batch, vocabulary), rows, device = call.logits.shape, call.rows, call.logits.device
    # Counts and the list's length start at 0: one tensor, one fill.
    zeros = torch.zeros(batch * (BINS + 1), dtype=torch.int32, device=device)
    counts, listed = zeros[batch:], zeros[:batch]
    keys = torch.empty((batch, vocabulary), dtype=torch.int64, device=device)
    mass = torch.empty((batch, call.programs), dtype=torch.int64, device=device)
    sure = torch.empty_like(mass)
    passing = torch.empty(batch, dtype=torch.int64, device=device)
    filters = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    cut = {"PARTS": triton.next_power_of_2(call.parts), "enable_fp_fusion": False}
    summed = {"PROGRAMS": triton.next_power_of_2(call.programs)}
    walk = cut | {"BLOCK": call.block, "GROUP": PARTS_A_PROGRAM, "BINS": BINS, "num_warps": WARPS}
    count_kernel[call.grid](call.logits, call.tops, *filters, counts, mass, *call.sizes, call.programs, **walk)
    collect_kernel[call.grid](
        call.logits, call.tops, *filters, counts, mass, listed, keys, sure, *call.sizes, call.programs, **walk, **summed
    )
    resolve_kernel[(batch,)](
        call.tops, *filters, mass, listed, keys, sure, passing, vocabulary, call.parts, call.programs,
        BLOCK=RESOLVE_BLOCK, num_warps=16, **cut, **summed,
    )  # fmt: skip
    return passing
