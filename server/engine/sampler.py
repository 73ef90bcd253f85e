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

    # Two copies to the device, not one a parameter.
    floats = torch.tensor([(s.temperature, s.top_p, s.min_p) for s in samples], dtype=torch.float64)
    integers = torch.tensor(
        [(s.top_k, s.seed, at) for s, at in zip(samples, positions, strict=True)], dtype=torch.int64
    )
    temperature, top_p, min_p = floats.to(logits.device).T.contiguous()
    top_k, seed, position = integers.to(logits.device).T.contiguous()
    rows = SamplingRows(
        temperature=temperature.to(torch.float32),
        top_k=top_k,
        top_p=top_p,
        min_p=min_p.to(torch.float32),
        seed=seed,
        position=position,
    )
    filtered = any(s.top_k > 0 or s.top_p < 1 for s in samples)
    token_ids, logprobs = kernels.sample(logits, rows, filtered)
    return [
        Sampled(token_id, logprob if wanted.logprobs else None)
        for token_id, logprob, wanted in zip(token_ids.tolist(), logprobs.tolist(), samples, strict=True)
    ]
