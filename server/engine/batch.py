"""What the scheduler hands the engine for one step, and what comes back. Plain values, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """Sample the token after the work's last one. Parameters as in statestore's SamplingParams; seed is int64."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """One sequence's share of a step: consume `token_ids` at positions [start, start + len), then perhaps sample.

    `start` must equal the sequence's consumed position. `token_ids` may be empty only when `sample` is set: then the
    stored final-norm row of the last consumed position is sampled again, and nothing is consumed.
    """

    sequence: int
    start: int
    token_ids: tuple[int, ...]
    sample: Sample | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token for position start + len(token_ids). `logprob`: at T = 1, before filters; None when not asked for."""

    token_id: int
    logprob: float | None = None
