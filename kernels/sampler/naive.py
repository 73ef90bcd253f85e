"""Sampling that is a function of (row of logits, parameters, seed, position) alone.

Floats appear elementwise only; every decision is a comparison of integers: unique keys order the tokens, masses are
summed as int64 (exact in any order), and a token's score is its log2 weight plus Gumbel noise, both in units of
2^-20. So a row gives the same token alone or in any batch, and so does any way to split it. There is no state: the
noise is a hash of (seed, position, token id), never of a rank or a row.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.elementwise import LN2, LOG2_E

GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2: Final = 0x94D049BB133111EB - (1 << 64)
"""SplitMix64's constants as int64 (Steele, Lea, Flood 2014); products wrap."""
SCORE_ONE: Final = 1 << 20
MASS_ONE: Final = float(1 << 32)
"""Mass of the most likely token for the filters: 2^32 a token leaves int64 room for 2^31 tokens."""
LOGPROB_MASS_ONE: Final = float(1 << 40)
"""Finer, for logprobs: 2^18 tokens of it still add up to 2^58."""
LOWEST_LOG2: Final = -2047.0
"""A score of -2047 * 2^20 still fits 32 bits with its noise; its probability is 0 in any float."""
LOWEST_SCORE: Final = -(1 << 31)
INVERSE_MAX: Final = 1e30
"""Largest log2(e) / temperature: still finite in fp32, and far beyond greedy."""
ID_MASK: Final = 0xFFFFFFFF


@dataclass(frozen=True)
class SamplingRows:
    """Parameters of B rows, each a tensor [B]. All filters are switched off by the value named."""

    temperature: Tensor
    """Float; <= 0 takes the largest logit."""
    top_k: Tensor
    """Integer; <= 0 keeps all."""
    top_p: Tensor
    """Float; >= 1 keeps all. The most likely token is always kept."""
    min_p: Tensor
    """Float, relative to the most likely token; <= 0 keeps all."""
    seed: Tensor
    """int64, any value."""
    position: Tensor
    """int64: position of the token to be sampled."""


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's output function, int64."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


def noise_bits(seed: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """32-bit hash of (seed [B], position [B], token id): int64 [B, vocabulary] in 0 .. 2^32 - 1."""
    row = _mix(_mix(seed + GOLDEN) + position * GOLDEN)
    token = torch.arange(1, vocabulary + 1, device=seed.device)
    return _shift_right(_mix(row[:, None] + token * GOLDEN), 32)


def gumbel_log2(bits: Tensor) -> Tensor:
    """Gumbel noise in log2 units from 32-bit hashes, fp64: -log2(-ln(1 - y)), y = (bits + 1/2) 2^-32.

    y lies strictly between 0 and 1, so the noise is finite for every hash: between -4.6 and 33.
    """
    y = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return -torch.log2(-torch.log1p(-y))


def token_keys(logits: Tensor) -> Tensor:
    """Unique int64 keys [B, V] in the order of fp32 logits without NaN; at equality the lower id has the larger key."""
    bits = logits.view(torch.int32).to(torch.int64)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ids = torch.arange(logits.shape[1], device=logits.device)
    return (ordered << 32) | (ID_MASK - ids)


def _cleaned(logits: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 logits without NaN, +inf and -0, and each row's maximum [B, 1], 0 where no logit is finite."""
    clean = logits.float().nan_to_num(nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf) + 0.0
    highest = clean.amax(dim=1, keepdim=True)
    return clean, torch.where(highest == -torch.inf, 0.0, highest)


def _fixed(x: Tensor) -> Tensor:
    """fp64 to int64 in units of 2^-20, rounded."""
    return torch.floor(x * SCORE_ONE + 0.5).to(torch.int64)


def _kept(keys: Tensor, weight: Tensor, rows: SamplingRows) -> Tensor:
    """Tokens that pass top-k and min-p, then top-p on the mass that is left: bool [B, V].

    weight [B, V] = 2^x relative to the most likely token, at the row's temperature.
    """
    vocabulary = keys.shape[1]
    order = keys.argsort(dim=1, descending=True)
    rank = torch.arange(vocabulary, device=keys.device)
    limit = torch.where(rows.top_k <= 0, vocabulary, rows.top_k)[:, None]
    sorted_weight = weight.gather(1, order)
    keep = (sorted_weight >= rows.min_p.to(weight.dtype)[:, None]) & (rank < limit)
    mass = torch.where(keep, (sorted_weight * MASS_ONE).to(torch.int64), 0)
    before = mass.cumsum(dim=1) - mass
    allowed = torch.floor(mass.sum(dim=1).to(torch.float64) * rows.top_p.to(torch.float64)).to(torch.int64)
    keep &= (before < allowed[:, None]) | (rows.top_p >= 1.0)[:, None] | (rank == 0)
    return torch.zeros_like(keep).scatter_(1, order, keep)


def sample(logits: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Takes one token a row: logits [B, V] -> token ids int64 [B] and their logprobs fp64 [B].

    The logprob is the model's own, at temperature 1 and before any filter. NaN counts as -inf, +inf as the largest
    fp32. A row without a finite logit yields token 0 with logprob -inf: the caller must not commit it.
    """
    clean, highest = _cleaned(logits)
    keys = token_keys(clean)
    greedy = (rows.temperature <= 0)[:, None]
    # Integers decide, so leaving work out that no row needs changes no row.
    best = keys if bool(greedy.all()) else torch.where(greedy, keys, _scores(clean - highest, keys, rows))
    tokens = ID_MASK - (best.amax(dim=1) & ID_MASK)
    return tokens, _logprobs(clean, highest, tokens)


def _scores(relative: Tensor, keys: Tensor, rows: SamplingRows) -> Tensor:
    """Unique int64 scores [B, V] of which the largest is drawn; relative [B, V] = logits below the row's maximum."""
    temperature = rows.temperature.to(torch.float64)
    inverse = (LOG2_E / torch.where(temperature <= 0, 1.0, temperature)).clamp(max=INVERSE_MAX)
    x = relative * inverse.to(torch.float32)[:, None]
    keep = relative > -torch.inf
    if bool(((rows.top_k > 0) | (rows.top_p < 1.0) | (rows.min_p > 0.0)).any()):
        keep &= _kept(keys, torch.exp(x * LN2), rows)
    noise = _fixed(gumbel_log2(noise_bits(rows.seed, rows.position, relative.shape[1])))
    score = (_fixed(x.to(torch.float64).clamp(min=LOWEST_LOG2)) + noise).clamp(min=LOWEST_SCORE + 1)
    ids = torch.arange(relative.shape[1], device=relative.device)
    return (torch.where(keep, score, LOWEST_SCORE) << 32) | (ID_MASK - ids)


def _logprobs(clean: Tensor, highest: Tensor, tokens: Tensor) -> Tensor:
    """Log-softmax of one token a row by integer mass: fp64 [B]. The total is an int64 sum, exact in any order."""
    mass = (torch.exp(clean - highest).to(torch.float64) * LOGPROB_MASS_ONE).to(torch.int64)
    total = mass.sum(dim=1).to(torch.float64) / LOGPROB_MASS_ONE
    own = (clean.gather(1, tokens[:, None]) - highest)[:, 0].to(torch.float64)
    return torch.where(total == 0.0, -torch.inf, own - torch.log2(total) * LN2)
