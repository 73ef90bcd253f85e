"""From the works of a step to the sampler kernel's rows and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from forkpoint.kernels.sampler.naive import SamplingRows
from forkpoint.model.kernels import Kernels
from forkpoint.server.engine.batch import Sample, Sampled


def sample_tokens(
    kernels: Kernels, logits: Tensor, samples: Sequence[Sample], positions: Sequence[int]
) -> list[Sampled]:
    """One token for each row of `logits` [B, vocab] fp32, all finite.

    `positions`: of the tokens to be sampled; they key the noise together with the seed. Rows don't influence each
    other, and there is no sampler state.
    """

    def column(values: list[int] | list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    rows = SamplingRows(
        temperature=column([s.temperature for s in samples], torch.float32),
        top_k=column([s.top_k for s in samples], torch.int64),
        top_p=column([s.top_p for s in samples], torch.float64),
        min_p=column([s.min_p for s in samples], torch.float32),
        seed=column([s.seed for s in samples], torch.int64),
        position=column(list(positions), torch.int64),
    )
    filtered = any(s.top_k > 0 or s.top_p < 1 for s in samples)
    token_ids, logprobs = kernels.sample(logits, rows, filtered)
    return [
        Sampled(token_id, logprob if wanted.logprobs else None)
        for token_id, logprob, wanted in zip(token_ids.tolist(), logprobs.tolist(), samples, strict=True)
    ]
