"""The sampler in Triton: kernels/sampler/naive.py's integers, with a row split over programs in any way.

Floats appear elementwise only. Programs hand on maxima and int64 sums, which are exact in any order, so the split of
a row (`block`) changes no token. Three launches without filters, six with them: the maxima of kernels/filters, the
threshold of kernels/threshold, then

- `survey_kernel`: logprob mass, and an fp32 estimate of each part's best score, if any of its tokens may pass;
- `draw_kernel`: exact scores, whose noise costs two fp64 logarithms a token, in the few parts whose estimate comes
  within `MARGIN` of the row's best.

| argument | dtype | shape |
| --- | --- | --- |
| logits | fp32, bf16 or fp16, rows contiguous | [B, V], V <= 2^24 |
| rows | SamplingRows of naive.py, tensors on the device of logits | [B] |
| result | token ids int64, logprobs fp64 | [B], [B] |
"""

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from forkpoint.kernels.elementwise import LN2
from forkpoint.kernels.filters.triton import (
    NO_THRESHOLD,
    PARTS_A_PROGRAM,
    VOCABULARY_MAX,
    WARPS,
    begin,
    filter_key,
    load_clean,
    load_scale,
    load_tops,
    ordered,
)
from forkpoint.kernels.sampler import naive
from forkpoint.kernels.sampler.naive import SamplingRows
from forkpoint.kernels.threshold.triton import threshold

BLOCK: Final = 1024
"""Tokens of a part."""
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)

GOLDEN = tl.constexpr(naive.GOLDEN)
MIX_1 = tl.constexpr(naive.MIX_1)
MIX_2 = tl.constexpr(naive.MIX_2)
LN_2 = tl.constexpr(LN2)
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
C_1 = tl.constexpr(1.4417403)
C_2 = tl.constexpr(-0.70777018)
C_3 = tl.constexpr(0.41234422)
C_4 = tl.constexpr(-0.19031903)
C_5 = tl.constexpr(0.04400469)
"""log2(1 + m) on 0 .. 1, least squares with 1 at 1."""
MARGIN = tl.constexpr(2.0**-6)
"""Over twice the error of an estimate, in log2 units: 2^-9 of noise, and 2^-13 of fp32 sums near 2^11."""


@triton.jit
def mix(x):
    """SplitMix64's output function on int64: shifts are logical, products wrap."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * MIX_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def noise_bits(base, token):
    """32-bit hash of a token id under a row's base, as int64."""
    return (mix(base + (token + 1).to(tl.int64) * GOLDEN) >> 32) & 0xFFFFFFFF


@triton.jit
def row_base(seed, position, row):
    """Hash of (seed, position)."""
    return mix(mix(tl.load(seed + row).to(tl.int64) + GOLDEN) + tl.load(position + row).to(tl.int64) * GOLDEN)


@triton.jit
def log2_estimate(x):
    """log2 of normal fp32, right to 2^-15: the exponent, and a polynomial of the rest that meets it at both ends."""
    bits = x.to(tl.int32, bitcast=True)
    m = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    return ((bits >> 23) - 127).to(tl.float32) + m * (C_1 + m * (C_2 + m * (C_3 + m * (C_4 + m * C_5))))


@triton.jit
def noise_estimate(bits):
    """Gumbel noise in log2 units, fp32, right to 2^-9: a series for log1p where 1 - y would lose it."""
    y = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = y * (1.0 + y * (0.5 + y * 0.33333334))
    rest = ((4294967295 - bits).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return -log2_estimate(tl.where(y < 0.125, series, log2_estimate(tl.minimum(rest, 0.9)) * -0.6931472))


@triton.jit
def noise_exact(bits):
    """Gumbel noise in units of 2^-20, int64. 1 - y is a multiple of 2^-33, exact in fp64: its log is log1p(-y)."""
    y = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return tl.floor(-tl.log2(-tl.log(1.0 - y)) * 1048576.0 + 0.5).to(tl.int64)


@triton.jit
def survey_kernel(
    logits, tops, temperature, min_p, threshold, seed, position, best, mass, row_stride, vocabulary, parts, programs,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Estimate of each part's best score, fp32 [B, parts]; logprob mass of each program, int64 [B, programs]."""
    row = tl.program_id(0).to(tl.int64)
    _, highest = load_tops(tops, row, parts, PARTS)
    scale = load_scale(temperature, row)
    least = tl.load(min_p + row).to(tl.float32)
    base = row_base(seed, position, row)
    total = tl.zeros((), dtype=tl.int64)
    passing = tl.full((), NO_THRESHOLD, dtype=tl.int64)
    if FILTERED:
        passing = tl.load(threshold + row)
    for index in range(GROUP):
        part = tl.program_id(1) * GROUP + index
        token, value = load_clean(logits, row, part, row_stride, vocabulary, BLOCK)
        relative = value - highest
        share = (tl.exp(relative) * 1099511627776.0).to(tl.int64)
        total += tl.sum(tl.where(token < vocabulary, share, 0), axis=0)
        candidates = part < parts
        if FILTERED:
            own = tl.load(tops + row * parts + part, mask=part < parts, other=-2147483648).to(tl.int64)
            candidates = candidates & (own + 2147483648 >= passing >> 24)
        best_here = tl.full((), float("-inf"), dtype=tl.float32)
        if candidates:
            if scale < 0.0:
                best_here = tl.max(value, axis=0)
            else:
                x = relative * scale
                keep = relative > float("-inf")
                if least > 0.0:
                    keep = keep & (tl.exp(x * LN_2) >= least)
                if FILTERED:
                    keep = keep & (filter_key(value, token) >= passing)
                score = tl.maximum(tl.maximum(x, -2047.0) + noise_estimate(noise_bits(base, token)), -2048.0)
                best_here = tl.max(tl.where(keep, score, float("-inf")), axis=0)
        tl.store(best + row * parts + part, best_here, mask=part < parts)
    tl.store(mass + row * programs + tl.program_id(1), total)


@triton.jit
def best_of_part(logits, row, part, highest, scale, least, passing, base, row_stride, vocabulary, BLOCK: tl.constexpr):
    """Largest (score, ~id) of one part as int64; the score of a greedy row is the ordered logit."""
    token, value = load_clean(logits, row, part, row_stride, vocabulary, BLOCK)
    if scale < 0.0:
        score = ordered(value).to(tl.int64)
    else:
        relative = value - highest
        x = relative * scale
        keep = (tl.exp(x * LN_2) >= least) & (filter_key(value, token) >= passing) & (relative > float("-inf"))
        score = tl.floor(tl.maximum(x.to(tl.float64), -2047.0) * 1048576.0 + 0.5).to(tl.int64)
        score = tl.maximum(score + noise_exact(noise_bits(base, token)), -2147483647)
        score = tl.where(keep, score, -2147483648)
    packed = (score << 32) | (4294967295 - token.to(tl.int64))
    return tl.max(tl.where(token < vocabulary, packed, -9223372036854775808), axis=0)


@triton.jit
def draw_kernel(
    logits, tops, temperature, min_p, threshold, seed, position, best, mass, tokens, logprobs, row_stride, vocabulary,
    parts, programs,
    FILTERED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The token of each row, int64 [B], and its logprob, fp64 [B]."""
    row = tl.program_id(0).to(tl.int64)
    _, highest = load_tops(tops, row, parts, PARTS)
    scale = load_scale(temperature, row)
    least = tl.load(min_p + row).to(tl.float32)
    base = row_base(seed, position, row)
    passing = tl.full((), NO_THRESHOLD, dtype=tl.int64)
    if FILTERED:
        passing = tl.load(threshold + row)
    part = tl.arange(0, PARTS)
    estimate = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    most = tl.max(estimate, axis=0)
    # Nothing to choose from, so equal scores everywhere: the first token has the largest ~id.
    wanted = tl.where(most == float("-inf"), part == 0, (estimate >= most - MARGIN) & (part < parts))
    packed = tl.full((), -9223372036854775808, dtype=tl.int64)
    now = tl.min(tl.where(wanted, part, PARTS), axis=0)
    while now < PARTS:
        candidate = best_of_part(logits, row, now, highest, scale, least, passing, base, row_stride, vocabulary, BLOCK)
        packed = tl.maximum(packed, candidate)
        now = tl.min(tl.where(wanted & (part > now), part, PARTS), axis=0)
    token = 4294967295 - (packed & 0xFFFFFFFF)
    tl.store(tokens + row, token)
    program = tl.arange(0, PROGRAMS)
    total = tl.sum(tl.load(mass + row * programs + program, mask=program < programs, other=0), axis=0)
    own = tl.load(logits + row * row_stride + token).to(tl.float32)
    own = tl.minimum(tl.where(own != own, float("-inf"), own), FP32_MAX)
    logprob = (own - highest).to(tl.float64) - tl.log2(total.to(tl.float64) / 1099511627776.0) * LN_2
    tl.store(logprobs + row, tl.where(total == 0, float("-inf"), logprob))


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


def sample(
    logits: Tensor, rows: SamplingRows, filtered: bool | None = None, block: int = BLOCK
) -> tuple[Tensor, Tensor]:
    """Takes one token a row, as kernels/sampler/naive.py says: [B, V] -> token ids int64 [B], logprobs fp64 [B].

    `filtered` says whether any row has a top-k or top-p, for callers that know (None asks the device, which waits for
    it). `block` is for tests: it changes nothing. Raises ValueError with `why_not`'s reason.
    """
    if reason := why_not(logits, rows):
        raise ValueError(reason)
    batch, device = logits.shape[0], logits.device
    tokens = torch.empty(batch, dtype=torch.int64, device=device)
    logprobs = torch.empty(batch, dtype=torch.float64, device=device)
    if not batch:
        return tokens, logprobs
    if filtered is None:
        filtered = bool(((rows.top_k > 0) | (rows.top_p < 1.0)).any())
    call = begin(logits, rows, block)
    passing = threshold(call) if filtered else tokens
    best = torch.empty((batch, call.parts), dtype=torch.float32, device=device)
    mass = torch.empty((batch, call.programs), dtype=torch.int64, device=device)
    padded = triton.next_power_of_2(call.parts)
    operands = logits, call.tops, rows.temperature, rows.min_p, passing, rows.seed, rows.position, best, mass
    survey_kernel[call.grid](
        *operands, *call.sizes, call.programs, FILTERED=filtered, BLOCK=block, PARTS=padded, GROUP=PARTS_A_PROGRAM,
        num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    draw_kernel[(batch,)](
        *operands, tokens, logprobs, *call.sizes, call.programs, FILTERED=filtered, BLOCK=block, PARTS=padded,
        PROGRAMS=triton.next_power_of_2(call.programs), num_warps=8, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, logprobs
