"""What the sampler's filters need to know of a row: its best logits, and the keys among which a filter may end.

A key orders tokens as the twin does: by logit, the lower id first among equals. Counts and masses are integers, so no
order of adding, no split of a row and no order of the list of keys changes a bit.

1. `highest_kernel`: the maximum of each part of a row.
2. `count_kernel`: for a top-k of no more than the parts, the k-th largest of their maxima: what is below it is out.
   Else how many tokens lie in each of 256 bins below the row's maximum, and the row's mass.
3. `collect_kernel`: the keys at or above that bound, or of the bins in which the filter may end, as a list, and the
   mass before those.

kernels/threshold makes one key a row of the list.
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
def bound_of(top, k):
    """The k-th largest of a row's part maxima, ordered, as int64: k tokens or more reach it. k is at most the parts."""
    low = tl.full((), -2147483648, dtype=tl.int64)
    high = tl.max(top, axis=0).to(tl.int64) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        if tl.sum((top.to(tl.int64) >= middle).to(tl.int32), axis=0) >= k:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def highest_kernel(logits, tops, row_stride, vocabulary, parts, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Ordered maximum of each part of a row: int32 [B, parts]."""
    row = tl.program_id(0).to(tl.int64)
    for index in tl.static_range(GROUP):
        part = tl.program_id(1) * GROUP + index
        _, value = load_clean(logits, row, part, row_stride, vocabulary, BLOCK)
        tl.store(tops + row * parts + part, tl.max(ordered(value), axis=0), mask=part < parts)


@triton.jit
def bins_of(value, highest, unit):
    """Number of a token's bin, `unit` a nat below the row's maximum: int32, the last one for all farther off."""
    return tl.minimum((highest - value) * unit, 255.0).to(tl.int32)


@triton.jit
def bin_unit(k, scale):
    """Bins of a nat: 8, for top-p also 8 for a halving of a token's mass, so that 256 bins hold all that have one."""
    return tl.where(k > 0, 8.0, tl.maximum(scale, 1.0) * 8.0)


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
    logits, tops, temperature, top_k, top_p, min_p, counts, mass, bounds, row_stride, vocabulary, parts, programs,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Tokens in each bin, int32 [B, BINS], and the mass of each program, int64 [B, programs]; or the bound [B]."""
    row = tl.program_id(0).to(tl.int64)
    scale = load_scale(temperature, row)
    k, _p, filters = load_limits(top_k, top_p, row, scale, vocabulary)
    if filters & (k > 0) & (k <= parts):
        if tl.program_id(1) == 0:
            top, _highest = load_tops(tops, row, parts, PARTS)
            tl.store(bounds + row, bound_of(top, k))
    elif filters:
        _tops, highest = load_tops(tops, row, parts, PARTS)
        unit = bin_unit(k, scale)
        least = tl.load(min_p + row).to(tl.float32)
        total = tl.zeros((), dtype=tl.int64)
        number = tl.zeros((BINS,), dtype=tl.int32)
        for index in range(GROUP):
            part = tl.program_id(1) * GROUP + index
            token, value = load_clean(logits, row, part, row_stride, vocabulary, BLOCK)
            inside = token < vocabulary
            number += tl.histogram(bins_of(value, highest, unit), BINS, mask=inside)
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
        # A bin's width in halvings of mass.
        width = tl.minimum(scale, 1.0) * 0.125
        edge = tl.arange(0, BINS).to(tl.float32) * -width
        heaviest = tl.exp(edge * LN_2) * 1.001
        lightest = tl.exp((edge - width) * LN_2) * 0.999
        most = tl.where(heaviest < least, 0.0, heaviest * 4294967296.0) * number.to(tl.float32)
        some = tl.where(lightest < least, 0.0, tl.maximum(lightest * 4294967296.0 - 1.0, 0.0))
        some = tl.where(tl.arange(0, BINS) == BINS - 1, 0.0, some) * number.to(tl.float32)
        first = tl.sum((tl.cumsum(most, axis=0) * 1.001 < goal * 0.999).to(tl.int32), axis=0)
        reached = tl.sum((tl.cumsum(some, axis=0) * 0.999 < goal * 1.001).to(tl.int32), axis=0)
        spared = tl.sum((tl.cumsum(most, axis=0, reverse=True) * 1.001 > spare).to(tl.int32), axis=0) - 1
        last = tl.maximum(tl.minimum(reached, spared), first)
    return first, last


@triton.jit
def append(keys, listed, row, vocabulary, token, value, wanted):
    """Keys of the wanted tokens to the end of the row's list, in no order."""
    found = tl.sum(wanted.to(tl.int32), axis=0)
    if found > 0:
        place = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
        start = tl.atomic_add(listed + row, found, sem="relaxed")
        tl.store(keys + row * vocabulary + start + place, filter_key(value, token), mask=wanted)


@triton.jit
def collect_kernel(
    logits, tops, temperature, top_k, top_p, min_p, counts, mass, bounds, listed, keys, sure, row_stride,
    vocabulary, parts, programs, BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, BINS: tl.constexpr,
    PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Appends the keys of a program's tokens from the bound up, or in uncertain bins, to the row's list.

    `sure` is the mass before those bins.
    """
    row = tl.program_id(0).to(tl.int64)
    scale = load_scale(temperature, row)
    k, p, filters = load_limits(top_k, top_p, row, scale, vocabulary)
    if filters & (k > 0) & (k <= parts):
        bound = tl.load(bounds + row)
        for index in range(GROUP):
            part = tl.program_id(1) * GROUP + index
            if tl.load(tops + row * parts + part, mask=part < parts, other=-2147483648) >= bound:
                token, value = load_clean(logits, row, part, row_stride, vocabulary, BLOCK)
                append(keys, listed, row, vocabulary, token, value, (token < vocabulary) & (ordered(value) >= bound))
    elif filters:
        _tops, highest = load_tops(tops, row, parts, PARTS)
        unit = bin_unit(k, scale)
        least = tl.load(min_p + row).to(tl.float32)
        number = tl.load(counts + row * BINS + tl.arange(0, BINS))
        total = load_total(mass, row, programs, PROGRAMS)
        first_bin, last_bin = uncertain_bins(number, k, p, total, scale, least, BINS)
        before = tl.zeros((), dtype=tl.int64)
        for index in range(GROUP):
            part = tl.program_id(1) * GROUP + index
            token, value = load_clean(logits, row, part, row_stride, vocabulary, BLOCK)
            bins = bins_of(value, highest, unit)
            share = filter_mass(value, highest, scale, least)
            before += tl.sum(tl.where((token < vocabulary) & (bins < first_bin), share, 0), axis=0)
            wanted = (token < vocabulary) & (bins >= first_bin) & (bins <= last_bin)
            append(keys, listed, row, vocabulary, token, value, wanted)
        tl.store(sure + row * programs + tl.program_id(1), before)


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
