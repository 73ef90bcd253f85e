"""The sampler in Triton: kernels/sampler/naive.py's integers, with a row split over programs in any way.

Floats appear elementwise only. Programs hand on int64 maxima and sums, which are exact in any order, so the split of
a row (`block`) changes no token. Filters find a threshold key by radix select, eight bits a pass, over int64
histograms: of counts for top-k, of mass for top-p. Histograms add by integer atomics, exact in any order as well.

| argument | dtype | shape |
| --- | --- | --- |
| logits | fp32, bf16 or fp16, rows contiguous | [B, V], V <= 2^24 |
| rows | SamplingRows of naive.py, tensors on the device of logits | [B] |
| result | token ids int64, logprobs fp64 | [B], [B] |
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

BLOCK: Final = 2048
"""Tokens of a program: eight a thread keep the fp64 noise in 78 registers."""
WARPS: Final = 8
ID_BITS: Final = 24
DIGIT_BITS: Final = 8
KEY_BITS: Final = 32 + ID_BITS
UNLIMITED: Final = (1 << 63) - 1
VOCABULARY_MAX: Final = 1 << ID_BITS
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

GOLDEN = tl.constexpr(naive.GOLDEN)
MIX_1 = tl.constexpr(naive.MIX_1)
MIX_2 = tl.constexpr(naive.MIX_2)
LN_2 = tl.constexpr(LN2)
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def mix(x):
    """SplitMix64's output function on int64: shifts are logical, products wrap."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def ordered(x):
    """int32 in the order of fp32, and back: the map is its own inverse on the bits."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_clean(logits, row_stride, vocabulary, BLOCK: tl.constexpr):
    """(row, token ids, fp32 logits) of a program: NaN as -inf, +inf as the largest fp32, -0 as 0."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * row_stride + token, mask=token < vocabulary, other=float("-inf")).to(tl.float32)
    value = tl.where(value != value, float("-inf"), value)
    value = tl.where(value > FP32_MAX, FP32_MAX, value)
    return row, token, tl.where(value == 0.0, 0.0, value)


@triton.jit
def load_highest(tops, row):
    """A row's maximum from its ordered int32, 0 where no logit is finite."""
    top = tl.load(tops + row)
    highest = (top ^ ((top >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    return tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit
def filter_key(value, token):
    """Unique non-negative int64 of 56 bits in the order of logits; at equality the lower id has the larger key."""
    return ((ordered(value).to(tl.int64) + 2147483648) << 24) | (16777215 - token).to(tl.int64)


@triton.jit
def highest_kernel(logits, tops, row_stride, vocabulary, BLOCK: tl.constexpr):
    """Ordered maximum of each part of a row: int32 [B, parts]."""
    row, _, value = load_clean(logits, row_stride, vocabulary, BLOCK)
    tl.store(tops + row * tl.num_programs(1) + tl.program_id(1), tl.max(ordered(value), axis=0))


@triton.jit
def score_kernel(
    logits, tops, inverse, min_p, threshold, seed, position, best, mass, row_stride, vocabulary, BLOCK: tl.constexpr
):
    """Largest (score, ~id) and sum of logprob mass of each part of a row: int64 [B, parts] both.

    inverse fp32 [B] = log2(e) / temperature, negative for a greedy row, whose score is the ordered logit.
    """
    row, token, value = load_clean(logits, row_stride, vocabulary, BLOCK)
    relative = value - load_highest(tops, row)
    part = row * tl.num_programs(1) + tl.program_id(1)
    inside = token < vocabulary
    share = (tl.exp(relative).to(tl.float64) * 1099511627776.0).to(tl.int64)
    tl.store(mass + part, tl.sum(tl.where(inside, share, 0), axis=0))
    scale = tl.load(inverse + row)
    if scale < 0.0:
        score = ordered(value).to(tl.int64)
    else:
        x = relative * scale
        keep = (tl.exp(x * LN_2) >= tl.load(min_p + row)) & (filter_key(value, token) >= tl.load(threshold + row))
        base = mix(mix(tl.load(seed + row) + GOLDEN) + tl.load(position + row) * GOLDEN)
        bits = (mix(base + (token + 1).to(tl.int64) * GOLDEN) >> 32) & 0xFFFFFFFF
        # 1 - y is a multiple of 2^-33 and exact in fp64, so its log is log1p(-y).
        y = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        noise = -tl.log2(-tl.log(1.0 - y))
        score = tl.floor(tl.maximum(x.to(tl.float64), -2047.0) * 1048576.0 + 0.5).to(tl.int64)
        score = tl.maximum(score + tl.floor(noise * 1048576.0 + 0.5).to(tl.int64), -2147483647)
        score = tl.where(keep & (relative > float("-inf")), score, -2147483648)
    packed = (score << 32) | (4294967295 - token.to(tl.int64))
    tl.store(best + part, tl.max(tl.where(inside, packed, -9223372036854775808), axis=0))


@triton.jit
def histogram_kernel(
    logits, tops, inverse, min_p, threshold, limit, prefix, histogram, row_stride, vocabulary, shift,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Adds one program's tokens under the row's prefix to its 256 bins: 1 each, or the mass of those still kept."""
    if tl.load(limit + tl.program_id(0)) < 9223372036854775807:
        row, token, value = load_clean(logits, row_stride, vocabulary, BLOCK)
        key = filter_key(value, token)
        counted = (token < vocabulary) & ((key >> (shift + 8)) == tl.load(prefix + row))
        if COUNT:
            share = tl.full((BLOCK,), 1, dtype=tl.int64)
        else:
            weight = tl.exp((value - load_highest(tops, row)) * tl.load(inverse + row) * LN_2)
            counted = counted & (weight >= tl.load(min_p + row)) & (key >= tl.load(threshold + row))
            share = (weight * 4294967296.0).to(tl.int64)
        digit = (key >> shift) & 255
        tl.atomic_add(histogram + row * 256 + digit, share, mask=counted & (share > 0), sem="relaxed")


@triton.jit
def descend_kernel(histogram, limit, prefix, above):
    """One digit of a row's threshold: the lowest whose keys above add up to less than the limit. Clears the bins."""
    row = tl.program_id(0).to(tl.int64)
    most = tl.load(limit + row)
    if most < 9223372036854775807:
        digit = tl.arange(0, 256)
        bins = tl.load(histogram + row * 256 + digit)
        so_far = tl.load(above + row)
        higher = tl.sum(bins, axis=0) - tl.cumsum(bins, axis=0)
        chosen = tl.min(tl.where(so_far + higher < most, digit, 255), axis=0)
        tl.store(above + row, so_far + tl.sum(tl.where(digit > chosen, bins, 0), axis=0))
        tl.store(prefix + row, tl.load(prefix + row) * 256 + chosen)
        tl.store(histogram + row * 256 + digit, tl.zeros((256,), dtype=tl.int64))


def why_not(logits: Tensor, rows: SamplingRows) -> str | None:
    """Why the kernels do not take a call, or None."""
    if logits.dim() != 2 or not 0 < logits.shape[1] <= VOCABULARY_MAX:
        return f"logits {tuple(logits.shape)} are not [B, V] with V from 1 to {VOCABULARY_MAX}"
    if logits.dtype not in DTYPES:
        return f"logits are {logits.dtype}, not fp32, bf16 or fp16"
    if logits.stride(1) != 1:
        return "the logits of a row are not contiguous"
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "position"):
        values = getattr(rows, name)
        if values.shape != (logits.shape[0],) or values.device != logits.device:
            return f"{name} {tuple(values.shape)} on {values.device} does not go with {logits.shape[0]} rows"
    return None


@dataclass(frozen=True)
class _Call:
    """What every kernel of one call needs."""

    logits: Tensor
    tops: Tensor
    inverse: Tensor
    min_p: Tensor
    block: int

    @property
    def grid(self) -> tuple[int, int]:
        return self.logits.shape[0], triton.cdiv(self.logits.shape[1], self.block)


def _select(call: _Call, limit: Tensor, threshold: Tensor, count: bool, top_p: Tensor | None = None) -> Tensor:
    """Lowest key of each row whose better keys add up to less than its limit, int64 [B]; unlimited rows keep theirs.

    With top_p the limit is that share of all mass, which the first pass finds.
    """
    rows, vocabulary = call.logits.shape
    prefix, above = torch.zeros_like(limit), torch.zeros_like(limit)
    histogram = limit.new_zeros((rows, 1 << DIGIT_BITS))
    for shift in range(KEY_BITS - DIGIT_BITS, -1, -DIGIT_BITS):
        histogram_kernel[call.grid](
            call.logits, call.tops, call.inverse, call.min_p, threshold, limit, prefix, histogram,
            call.logits.stride(0), vocabulary, shift, COUNT=count, BLOCK=call.block, num_warps=WARPS,
            enable_fp_fusion=False,
        )  # fmt: skip
        if top_p is not None and shift == KEY_BITS - DIGIT_BITS:
            share = torch.floor(histogram.sum(dim=1).to(torch.float64) * top_p).to(torch.int64)
            # At least 1: the most likely token is always kept.
            limit = torch.where(limit == UNLIMITED, limit, share.clamp(min=1))
        descend_kernel[(rows,)](histogram, limit, prefix, above, num_warps=1)
    return torch.where(limit == UNLIMITED, threshold, prefix)


def _threshold(call: _Call, rows: SamplingRows) -> Tensor:
    """Lowest filter key that passes top-k, then top-p on the mass left: int64 [B]."""
    none = torch.full_like(rows.seed, -UNLIMITED - 1)
    unlimited = torch.full_like(rows.seed, UNLIMITED)
    sampled = rows.temperature > 0
    top_k = rows.top_k.to(torch.int64)
    limit = torch.where(sampled & (top_k > 0) & (top_k < call.logits.shape[1]), top_k, unlimited)
    threshold = _select(call, limit, none, count=True)
    limit = torch.where(sampled & (rows.top_p < 1.0), 1, unlimited)
    return _select(call, limit, threshold, count=False, top_p=rows.top_p.to(torch.float64))


def sample(
    logits: Tensor, rows: SamplingRows, filtered: bool | None = None, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """Takes one token a row, as kernels/sampler/naive.py says: [B, V] -> token ids int64 [B], logprobs fp64 [B].

    `filtered` says whether any row filters, for callers that know (None asks the device, which waits for it). `block`
    is for tests: it changes nothing. Raises ValueError with `why_not`'s reason.
    """
    if reason := why_not(logits, rows):
        raise ValueError(reason)
    batch, vocabulary = logits.shape
    if not batch:
        return rows.seed.new_empty(0), rows.seed.new_empty(0, dtype=torch.float64)
    parts = triton.cdiv(vocabulary, block)
    tops = torch.empty((batch, parts), dtype=torch.int32, device=logits.device)
    highest_kernel[(batch, parts)](logits, tops, logits.stride(0), vocabulary, BLOCK=block, num_warps=WARPS)
    temperature = rows.temperature.to(torch.float64)
    inverse = (LOG2_E / torch.where(temperature <= 0, 1.0, temperature)).clamp(max=naive.INVERSE_MAX)
    call = _Call(
        logits=logits,
        tops=tops.amax(dim=1),
        inverse=torch.where(temperature <= 0, -1.0, inverse.to(torch.float32)),
        min_p=rows.min_p.to(torch.float32),
        block=block,
    )
    if filtered is None:
        filtered = bool(((rows.top_k > 0) | (rows.top_p < 1.0)).any())
    threshold = _threshold(call, rows) if filtered else torch.full_like(rows.seed, -UNLIMITED - 1)
    best = torch.empty((batch, parts), dtype=torch.int64, device=logits.device)
    mass = torch.empty_like(best)
    score_kernel[(batch, parts)](
        logits, call.tops, call.inverse, call.min_p, threshold, rows.seed, rows.position, best, mass,
        logits.stride(0), vocabulary, BLOCK=block, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    tokens = naive.ID_MASK - (best.amax(dim=1) & naive.ID_MASK)
    return tokens, _logprobs(logits, call.tops, mass.sum(dim=1), tokens)


def _logprobs(logits: Tensor, tops: Tensor, mass: Tensor, tokens: Tensor) -> Tensor:
    """Log-softmax of one token a row from its total mass: fp64 [B]."""
    highest = (tops ^ ((tops >> 31) & 0x7FFFFFFF)).view(torch.float32)
    own = logits.gather(1, tokens[:, None])[:, 0].float()
    own = own.nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
    total = mass.to(torch.float64) / naive.LOGPROB_MASS_ONE
    logprob = (own - torch.where(highest == -torch.inf, 0.0, highest)).to(torch.float64) - torch.log2(total) * LN2
    return torch.where(mass == 0, -torch.inf, logprob)
