"""The integer sampler beside what torch offers for the same request, and beside reading the logits once."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.run import COPY_BYTES_A_US, OURS, Call, Case, Rows, Run, copies, equal, timed
from forkpoint.kernels.sampler import naive
from forkpoint.kernels.sampler import triton as sampler
from forkpoint.kernels.sampler.naive import SamplingRows

TEMPERATURE, TOP_K, TOP_P = 0.8, 50, 0.9


def with_torch(logits: Tensor, filtered: bool) -> Tensor:
    """A draw by softmax and multinomial, after torch's top-k and a top-p over what is left."""
    if not filtered:
        return torch.multinomial(torch.softmax(logits / TEMPERATURE, dim=-1), 1)
    best, ids = torch.topk(logits / TEMPERATURE, TOP_K, dim=-1)
    share = torch.softmax(best, dim=-1)
    kept = share.cumsum(dim=-1) - share < TOP_P
    return ids.gather(1, torch.multinomial(torch.where(kept, share, 0.0), 1))


def times(run: Run, filtered: bool, batch: int = 64) -> Rows:
    """One request for all rows of a batch."""
    batch, vocabulary = (2, 300) if run.dry else (batch, 163_840)
    rows = SamplingRows(
        temperature=torch.full((batch,), TEMPERATURE, device=run.device),
        top_k=torch.full((batch,), TOP_K if filtered else 0, device=run.device),
        top_p=torch.full((batch,), TOP_P if filtered else 1.0, device=run.device),
        min_p=torch.zeros(batch, device=run.device),
        seed=torch.arange(batch, device=run.device) * 7919,
        position=torch.arange(batch, device=run.device) + 1_000_000,
    )
    nbytes = 4 * batch * vocabulary
    sets = [
        (run.random(batch, vocabulary, dtype=torch.float32) * 3).to(torch.bfloat16).float()
        for _ in range(1 if run.dry else copies(nbytes))
    ]
    case = f"sample {batch} x {vocabulary}, {f'top-k {TOP_K}, top-p {TOP_P}' if filtered else 'no filters'}"
    first, other = sampler.sample(sets[0], rows), sampler.sample(sets[0], rows, block=2048)
    yield equal(case, "any split", list(zip(first, other, strict=True)))
    same = equal(case, "tokens of the definition", [(first[0], naive.sample(sets[0], rows)[0])])
    yield same
    if not same.value:
        return
    ours: list[Call] = [partial(sampler.sample, logits, rows, filtered) for logits in sets]
    torchs: list[Call] = [partial(with_torch, logits, filtered) for logits in sets]
    found = run.compare({OURS: ours, "torch": torchs})
    yield timed(case, "time", found[OURS], ("torch", found.get("torch")), nbytes / COPY_BYTES_A_US)


def cases(run: Run) -> list[Case]:
    """Without filters, and with two."""
    return [("sampler", partial(times, run, False)), ("sampler, filters", partial(times, run, True))]
