"""The sampler in Triton draws the naive twin's tokens, however a row is split over programs."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from forkpoint.kernels.elementwise import LN2, LOG2_E
from forkpoint.kernels.filters import triton as filters
from forkpoint.kernels.sampler import naive
from forkpoint.kernels.sampler import triton as sampler
from forkpoint.kernels.sampler.naive import SamplingRows
from forkpoint.kernels.threshold import triton as threshold
from tests.support.triton_shim import DEVICE

VOCABULARY = 1003


def parameters(count: int, generator: torch.Generator) -> SamplingRows:
    """Mixed rows: greedy ones, and every filter on and off."""

    def uniform() -> Tensor:
        return torch.rand(count, generator=generator)

    return SamplingRows(
        temperature=torch.where(uniform() < 0.2, 0.0, uniform() * 1.2 + 0.1).to(DEVICE),
        top_k=torch.where(uniform() < 0.5, 0, torch.randint(1, 60, (count,), generator=generator)).to(DEVICE),
        top_p=torch.where(uniform() < 0.4, 1.0, uniform()).to(DEVICE),
        min_p=torch.where(uniform() < 0.6, 0.0, uniform() * 0.2).to(DEVICE),
        seed=torch.randint(-(2**62), 2**62, (count,), generator=generator).to(DEVICE),
        position=torch.randint(0, 2**40, (count,), generator=generator).to(DEVICE),
    )


def inputs(count: int, seed: int = 0, vocabulary: int = VOCABULARY) -> tuple[Tensor, SamplingRows]:
    """Logits with many ties, rows of ties only, and rows cut short by -inf."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(count, vocabulary, generator=generator) * 3).bfloat16().float()
    logits[0] = logits[0].round()
    logits[1, vocabulary // 3 :] = -torch.inf
    logits[2] = 1.5
    return logits.to(DEVICE), parameters(count, generator)


def pick(rows: SamplingRows, which: list[int]) -> SamplingRows:
    return SamplingRows(**{name: value[which] for name, value in vars(rows).items()})


def only(rows: SamplingRows, **changed: float) -> SamplingRows:
    """All rows drawn at temperature 1 without filters, except as named."""
    plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | changed
    return SamplingRows(
        **{name: torch.full_like(getattr(rows, name), value) for name, value in plain.items()},
        seed=rows.seed,
        position=rows.position,
    )


def test_tokens_are_the_naive_twins_and_logprobs_agree() -> None:
    logits, rows = inputs(28)
    tokens, logprobs = sampler.sample(logits, rows, block=1024)
    twin, twin_logprobs = naive.sample(logits, rows)
    assert torch.equal(tokens, twin)
    torch.testing.assert_close(logprobs, twin_logprobs, rtol=0, atol=2e-6)


def test_tokens_without_filters_are_the_naive_twins() -> None:
    logits, rows = inputs(60, 1, 300)
    rows = only(rows)
    assert torch.equal(sampler.sample(logits, rows, block=512)[0], naive.sample(logits, rows)[0])


@pytest.mark.parametrize("block", [256, 512, 2048])
def test_every_split_of_a_row_gives_the_same_bytes(block: int) -> None:
    logits, rows = inputs(6, 2)
    first, other = sampler.sample(logits, rows, block=1024), sampler.sample(logits, rows, block=block)
    assert torch.equal(first[0], other[0])
    assert torch.equal(first[1], other[1])


def test_a_row_alone_draws_what_it_draws_in_a_batch() -> None:
    logits, rows = inputs(10, 3)
    tokens, logprobs = sampler.sample(logits, rows, block=1024)
    for which in ([0], [5], [9, 2, 2, 7]):
        part, part_logprobs = sampler.sample(logits[which], pick(rows, which), block=1024)
        assert torch.equal(part, tokens[which])
        assert torch.equal(part_logprobs, logprobs[which])


@pytest.mark.parametrize(
    "changed",
    [
        {"top_k": 1}, {"top_k": 2}, {"top_k": VOCABULARY}, {"top_k": 5000}, {"top_p": 0.0}, {"top_p": 1e-9},
        {"top_p": 0.999999}, {"min_p": 1.0}, {"min_p": 2.0}, {"top_k": 40, "top_p": 0.5, "min_p": 0.01},
        {"temperature": 1e-30}, {"temperature": 1e30, "top_p": 0.3},
    ],
    ids=str,
)  # fmt: skip
def test_filters_at_their_ends_keep_what_the_naive_twin_keeps(changed: dict[str, float]) -> None:
    logits, rows = inputs(3, 4)
    rows = only(rows, **changed)
    assert torch.equal(sampler.sample(logits, rows, block=1024)[0], naive.sample(logits, rows)[0])


@pytest.mark.parametrize(
    "changed",
    [
        {"top_k": 7},
        {"top_p": 0.7},
        {"top_p": 0.05},
        {"top_k": 20, "top_p": 0.999},
        {"top_k": 300, "top_p": 0.9, "min_p": 0.02},
        {"top_p": 0.6, "temperature": 40.0},
        {"top_p": 0.9, "temperature": 0.05},
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [32, 1024])
@pytest.mark.parametrize("short", [threshold.SHORT, 2])
def test_filters_keep_the_set_that_the_naive_twin_keeps(
    changed: dict[str, float], block: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kept set itself, beyond the tokens drawn from it; of lists that are sorted and of lists that are halved."""
    monkeypatch.setattr(threshold, "SHORT", short)
    logits, rows = inputs(4, 5)
    rows = only(rows, **changed)
    keys = naive.token_keys(logits + 0.0)  # as the twin does: -0 is 0
    passing = threshold.threshold(filters.begin(logits, rows, block))
    inverse = (LOG2_E / rows.temperature.double()).float()[:, None]
    weight = torch.exp((logits - logits.amax(dim=1, keepdim=True)) * inverse * LN2)
    ids = torch.arange(VOCABULARY, device=DEVICE)
    filter_keys = (((keys >> 32) + (1 << 31)) << 24) | ((1 << 24) - 1 - ids)
    kept = (filter_keys >= passing[:, None]) & (weight >= rows.min_p[:, None])
    assert torch.equal(kept, naive._kept(keys, weight, rows))


def test_estimated_noise_is_as_near_as_its_margin_needs() -> None:
    @triton.jit  # type: ignore[untyped-decorator]
    def estimate(bits, out, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = place < count
        noise = sampler.noise_estimate(tl.load(bits + place, mask=inside, other=0))
        tl.store(out + place, noise, mask=inside)

    ends = [0, 1, 2, 2**29 - 1, 2**29, 2**31, 2**32 - 2, 2**32 - 1]
    spread = torch.randint(0, 2**32, (4000,), generator=torch.Generator().manual_seed(10))
    small = 2 ** torch.linspace(0, 31.9, 500, dtype=torch.float64)
    bits = torch.cat([torch.tensor(ends), spread, small.long(), 2**32 - 1 - small.long()]).to(DEVICE)
    out = torch.empty(bits.shape, dtype=torch.float32, device=DEVICE)
    estimate[(triton.cdiv(len(bits), 1024),)](bits, out, len(bits), BLOCK=1024)
    assert float((out.double() - naive.gumbel_log2(bits)).abs().max()) < 2**-9 < sampler.MARGIN.value / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_nan_infinity_negative_zero_and_hopeless_rows_are_those_of_the_naive_twin(dtype: torch.dtype) -> None:
    logits, rows = inputs(8, 6)
    logits = logits.to(dtype)
    logits[3, 5] = torch.nan
    logits[4, 9] = torch.inf
    logits[5] = torch.nan
    logits[6] = -torch.inf
    logits[7, :500] = -0.0
    logits[7, 500:] = 0.0
    for parameters in (only(rows), only(rows, temperature=0.0), only(rows, top_p=0.5)):
        tokens, logprobs = sampler.sample(logits, parameters, block=1024)
        twin, twin_logprobs = naive.sample(logits, parameters)
        assert torch.equal(tokens, twin)
        torch.testing.assert_close(logprobs, twin_logprobs, rtol=0, atol=2e-6)


def test_logits_in_a_wider_tensor_of_poison_are_sampled_alike() -> None:
    logits, rows = inputs(3, 7)
    room = torch.full((3, VOCABULARY + 40), torch.inf, device=DEVICE)
    room[:, 20 : 20 + VOCABULARY] = logits
    tokens, _ = sampler.sample(room[:, 20 : 20 + VOCABULARY], rows, block=1024)
    assert torch.equal(tokens, sampler.sample(logits, rows, block=1024)[0])


def test_no_rows_give_no_tokens() -> None:
    logits, rows = inputs(3, 8)
    tokens, logprobs = sampler.sample(logits[:0], pick(rows, []))
    assert tokens.shape == logprobs.shape == (0,)


def test_the_sampler_says_why_it_refuses() -> None:
    logits, rows = inputs(3, 9)
    assert sampler.why_not(logits, rows) is None
    assert "[B, V]" in str(sampler.why_not(logits[0], rows))
    assert "float64" in str(sampler.why_not(logits.double(), rows))
    assert "contiguous" in str(sampler.why_not(logits.t().contiguous().t(), rows))
    assert "3 rows" in str(sampler.why_not(logits, pick(rows, [0])))
