"""Where the filters of the sampler end: one threshold key a row, from which tokens are kept.

A key orders tokens as the twin does: by logit, the lower id first among equals. Counts and masses are integers, so no
order of adding, no split of a row and no order of the list of keys changes a bit.

1. `highest_kernel`: the maximum of each part of a row.
2. `collect_kernel`: the keys of tokens that may lie at a filter's edge, as a list, and the mass of the row.
3. `resolve_kernel`: halves an interval of keys until it holds the edge, on counts for top-k, on masses for top-p.
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
ID_BITS: Final = 24
VOCABULARY_MAX: Final = 1 << ID_BITS

LN_2 = tl.constexpr(LN2)
LOG_2_E = tl.constexpr(LOG2_E)
INVERSE_MAX = tl.constexpr(naive.INVERSE_MAX)
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
NO_THRESHOLD = tl.constexpr(-(1 << 63))
PAIRS_MAX = tl.constexpr(256)
"""Parts whose maxima are ranked pair by pair."""


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
def lowest_wanted(tops, top, highest, scale, top_k, top_p, vocabulary, parts, PARTS: tl.constexpr):
    """(ordered int32, fp32 weight) below which no token is at the edge of a row's filters.

    top-k: the k-th largest of the parts' maxima has k tokens at or above it. top-p: tokens below a weight w have less
    than V w of the mass, and all that top-p leaves out is a share 1 - p of at least the sum of the maxima's weights.
    """
    part = tl.arange(0, PARTS)
    floor = -2147483648
    weight = 0.0
    if (top_k > 0) & (top_k < vocabulary):
        if PARTS <= PAIRS_MAX:
            larger = tl.zeros((PARTS,), dtype=tl.int32)
            for first in range(0, parts, 32):
                other = first + tl.arange(0, 32)
                rival = tl.load(tops + other, mask=other < parts, other=-2147483648)
                larger += tl.sum((rival[None, :] > top[:, None]).to(tl.int32), axis=1)
            floor = tl.min(tl.where((larger < top_k) & (part < parts), top, 2147483647), axis=0)
            floor = tl.where(top_k <= parts, floor, -2147483648)
    else:
        # Integers of 2^-20 add up to the same in any order.
        share = tl.exp((value_of(top) - highest) * scale * LN_2)
        least = tl.sum((tl.where(part < parts, share, 0.0) * 1048576.0).to(tl.int64), axis=0).to(tl.float32) / 1048576.0
        weight = (1.0 - top_p).to(tl.float32) * least * 0.98 / vocabulary
    return floor, weight


@triton.jit
def collect_kernel(
    logits, tops, temperature, top_k, top_p, min_p, listed, keys, mass, row_stride, vocabulary, parts, programs,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Appends a program's keys at or above `lowest_wanted` to the row's list, and stores its mass: [B, programs]."""
    row = tl.program_id(0).to(tl.int64)
    scale = load_scale(temperature, row)
    k = tl.load(top_k + row).to(tl.int64)
    p = tl.load(top_p + row).to(tl.float64)
    if (scale >= 0.0) & (((k > 0) & (k < vocabulary)) | (p < 1.0)):
        top, highest = load_tops(tops, row, parts, PARTS)
        floor, lightest = lowest_wanted(tops + row * parts, top, highest, scale, k, p, vocabulary, parts, PARTS)
        least = tl.load(min_p + row).to(tl.float32)
        total = tl.zeros((), dtype=tl.int64)
        for index in range(GROUP):
            part = tl.program_id(1) * GROUP + index
            token, value = load_clean(logits, row, part, row_stride, vocabulary, BLOCK)
            inside = token < vocabulary
            share = tl.where(inside, filter_mass(value, highest, scale, least), 0)
            total += tl.sum(share, axis=0)
            weight = tl.exp((value - highest) * scale * LN_2)
            wanted = inside & (ordered(value) >= floor) & (weight >= lightest)
            place = tl.cumsum(wanted.to(tl.int32), axis=0) - 1
            first = tl.atomic_add(listed + row, tl.sum(wanted.to(tl.int32), axis=0), sem="relaxed")
            tl.store(keys + row * vocabulary + first + place, filter_key(value, token), mask=wanted)
        tl.store(mass + row * programs + tl.program_id(1), total)


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
    tops, temperature, top_k, top_p, min_p, listed, keys, mass, threshold, vocabulary, parts, programs,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The lowest key of each row that passes top-k, then top-p on the mass that is left: int64 [B]."""
    row = tl.program_id(0).to(tl.int64)
    scale = load_scale(temperature, row)
    k = tl.load(top_k + row).to(tl.int64)
    p = tl.load(top_p + row).to(tl.float64)
    passing = tl.full((), NO_THRESHOLD, dtype=tl.int64)
    if scale >= 0.0:
        _tops, highest = load_tops(tops, row, parts, PARTS)
        least = tl.load(min_p + row).to(tl.float32)
        count = tl.load(listed + row)
        keys += row * vocabulary
        end = ((ordered(highest).to(tl.int64) + 2147483648) << 24) + 16777216
        if (k > 0) & (k < vocabulary):
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
        else:
            program = tl.arange(0, PROGRAMS)
            total = tl.sum(tl.load(mass + row * programs + program, mask=program < programs, other=0), axis=0)
        if p < 1.0:
            # At least 1: the most likely token is always kept.
            limit = tl.maximum(tl.floor(total.to(tl.float64) * p).to(tl.int64), 1)
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
    batch, vocabulary = call.logits.shape
    rows, device, padded = call.rows, call.logits.device, triton.next_power_of_2(call.parts)
    listed = torch.zeros(batch, dtype=torch.int32, device=device)
    keys = torch.empty((batch, vocabulary), dtype=torch.int64, device=device)
    mass = torch.empty((batch, call.programs), dtype=torch.int64, device=device)
    passing = torch.empty(batch, dtype=torch.int64, device=device)
    filters = rows.temperature, rows.top_k, rows.top_p, rows.min_p
    collect_kernel[call.grid](
        call.logits, call.tops, *filters, listed, keys, mass, *call.sizes, call.programs,
        BLOCK=call.block, PARTS=padded, GROUP=PARTS_A_PROGRAM, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    resolve_kernel[(batch,)](
        call.tops, *filters, listed, keys, mass, passing, vocabulary, call.parts, call.programs,
        BLOCK=RESOLVE_BLOCK, PARTS=padded, PROGRAMS=triton.next_power_of_2(call.programs),
        num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return passing
