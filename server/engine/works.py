"""Checks on a step's works: everything wrong with a step is found before anything changes."""

import math
from collections.abc import Sequence

from forkpoint.errors import ContextFullError, TokenOutOfRangeError
from forkpoint.server.engine.batch import Sample, Work
from forkpoint.server.engine.sequences import LiveSequence


def check_works(works: Sequence[Work], sequences: Sequence[LiveSequence], vocab_size: int, context_limit: int) -> None:
    """Check each work against its sequence.

    Raises ValueError (twice the same sequence, wrong start, nothing to do, no row to sample, sampling parameters out of
    range, restore not ended), TokenOutOfRangeError, ContextFullError.
    """
    if len({work.sequence for work in works}) != len(works):
        raise ValueError("a sequence appears twice in a step")
    for work, sequence in zip(works, sequences, strict=True):
        sequence.require_ready()
        if work.start != sequence.consumed:
            raise ValueError(f"sequence {work.sequence}: start {work.start}, consumed {sequence.consumed}")
        for index, token_id in enumerate(work.token_ids):
            if not 0 <= token_id < vocab_size:
                raise TokenOutOfRangeError(token_id, index, vocab_size)
        end = work.start + len(work.token_ids)
        if end > context_limit:
            raise ContextFullError(f"sequence {work.sequence}", end, context_limit)
        if work.sample is not None:
            check_sample(work.sample)
        if not work.token_ids:
            if work.sample is None:
                raise ValueError(f"sequence {work.sequence}: neither tokens nor a sample")
            if not sequence.can_sample:
                raise ValueError(f"sequence {work.sequence}: no row of position {work.start - 1} to sample from")


def check_sample(sample: Sample) -> None:
    """Raise ValueError when a sampling parameter is out of range. The API checks the same and names its field."""
    if not (math.isfinite(sample.temperature) and sample.temperature >= 0):
        raise ValueError(f"temperature {sample.temperature} is not in [0, inf)")
    if sample.top_k < 0:
        raise ValueError(f"top_k {sample.top_k} is negative")
    if not 0 < sample.top_p <= 1:
        raise ValueError(f"top_p {sample.top_p} is not in (0, 1]")
    if not 0 <= sample.min_p <= 1:
        raise ValueError(f"min_p {sample.min_p} is not in [0, 1]")
    if not -(1 << 63) <= sample.seed < 1 << 63:
        raise ValueError(f"seed {sample.seed} is not a signed 64-bit number")
