"""The sampler: its distribution, its filters against fp64, and a row alone against the row in any batch."""

import math

import pytest
import torch
from torch import Tensor

from forkpoint.kernels.sampler.naive import SamplingRows, gumbel_log2, noise_bits, sample, token_keys

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "position": 0}
DTYPES = {"top_k": torch.int64, "seed": torch.int64, "position": torch.int64}


def rows(count: int, **given: float | Tensor) -> SamplingRows:
    """`count` rows with the same parameters, or a tensor of them for those given as one."""
    columns: dict[str, Tensor] = {}
    settings: dict[str, float | Tensor] = {**OFF, **given}
    for name, value in settings.items():
        columns[name] = value if isinstance(value, Tensor) else torch.full((count,), value, dtype=DTYPES.get(name))
    return SamplingRows(**columns)


def pick(all_rows: SamplingRows, which: Tensor) -> SamplingRows:
    return SamplingRows(**{name: getattr(all_rows, name)[which] for name in OFF})


def filtered(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """fp64 probabilities of one row after the filters: min-p and top-k first, top-p on the mass that is left."""
    p = (logits.double() / temperature).softmax(0)
    order = logits.sort(descending=True, stable=True).indices
    keep = p[order] >= min_p * p.max()
    if top_k > 0:
        keep[top_k:] = False
    left = torch.where(keep, p[order], 0.0)
    left = left / left.sum()
    if top_p < 1:
        keep &= left.cumsum(0) - left < top_p
    result = torch.zeros_like(p)
    result[order] = torch.where(keep, p[order], 0.0)
    return result / result.sum()


SETTINGS = [
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 0.9, 0.0),
    (1.3, 7, 1.0, 0.0),
    (1.0, 0, 1.0, 0.1),
    (1.0, 20, 0.8, 0.02),
    (2.0, 1, 1.0, 0.0),
]
"""Temperature, top-k, top-p, min-p."""


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_follow_the_filtered_distribution(setting: tuple[float, int, float, float]) -> None:
    temperature, top_k, top_p, min_p = setting
    draws, logits = 50_000, (torch.randn(40) * 2).round(decimals=1)
    parameters = rows(
        draws, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=12345, position=torch.arange(draws)
    )
    tokens, _ = sample(logits.expand(draws, 40).contiguous(), parameters)
    expected = filtered(logits, *setting) * draws
    counts, kept = tokens.bincount(minlength=40).double(), expected > 0
    assert int(counts[~kept].sum()) == 0
    chi_squared = float(((counts - expected)[kept].square() / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert chi_squared <= freedom + 4 * math.sqrt(2 * freedom)


def test_draws_of_many_seeds_follow_the_distribution_too() -> None:
    draws, logits = 50_000, torch.randn(20)
    tokens, _ = sample(
        logits.expand(draws, 20).contiguous(), rows(draws, seed=torch.arange(draws) - 25_000, position=9)
    )
    expected = logits.double().softmax(0) * draws
    chi_squared = float(((tokens.bincount(minlength=20) - expected).square() / expected).sum())
    assert chi_squared <= 19 + 4 * math.sqrt(38)


def mixed(count: int, vocabulary: int) -> tuple[Tensor, SamplingRows]:
    """Rows with every mix of parameters, coarse logits among them so that many tie."""
    r = torch.rand
    logits = torch.randn(count, vocabulary) * 3
    logits[::3] = logits[::3].round()
    logits[5, vocabulary // 2 :] = -torch.inf
    parameters = rows(
        count,
        temperature=torch.where(r(count) < 0.2, 0.0, r(count) * 1.2 + 0.1),
        top_k=torch.where(r(count) < 0.5, 0, torch.randint(1, 60, (count,))),
        top_p=torch.where(r(count) < 0.4, 1.0, r(count)),
        min_p=torch.where(r(count) < 0.6, 0.0, r(count) * 0.2),
        seed=torch.randint(-(2**62), 2**62, (count,)),
        position=torch.randint(0, 2**40, (count,)),
    )
    return logits, parameters


@pytest.mark.parametrize("vocabulary", [17, 272, 5000])
def test_a_row_gives_the_same_token_alone_in_a_batch_and_permuted(vocabulary: int) -> None:
    logits, parameters = mixed(48, vocabulary)
    tokens, logprobs = sample(logits, parameters)
    for n in range(48):
        which = torch.tensor([n])
        token, logprob = sample(logits[which], pick(parameters, which))
        assert int(token) == int(tokens[n]) and torch.equal(logprob, logprobs[which])
    for which in (torch.randperm(48), torch.tensor([7, 3, 3, 40]), torch.arange(10, 31)):
        token, logprob = sample(logits[which], pick(parameters, which))
        assert torch.equal(token, tokens[which]) and torch.equal(logprob, logprobs[which])


def test_a_kept_set_is_the_reference_one() -> None:
    """Over many draws every token of the fp64 set comes up and no other, where the set's border is not a near tie."""
    for temperature, top_k, top_p, min_p in (
        (1.0, 5, 1.0, 0.0),
        (0.8, 0, 0.75, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.5, 6, 0.9, 0.05),
    ):
        logits = torch.randn(30)
        count = 20_000
        parameters = rows(
            count, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, position=torch.arange(count)
        )
        tokens, _ = sample(logits.expand(count, 30).contiguous(), parameters)
        expected = filtered(logits, temperature, top_k, top_p, min_p)
        assert set(tokens.tolist()) == set(expected.nonzero()[:, 0].tolist())


def test_top_k_breaks_ties_towards_the_lower_id() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, -3.0]).expand(3000, 6).contiguous()
    tokens, _ = sample(logits, rows(3000, top_k=3, position=torch.arange(3000)))
    assert set(tokens.tolist()) == {1, 2, 3}


def test_top_p_keeps_the_most_likely_token_even_at_zero() -> None:
    logits = torch.randn(50, 30)
    tokens, _ = sample(logits, rows(50, top_p=0.0, position=torch.arange(50)))
    assert torch.equal(tokens, logits.argmax(1))


def test_top_p_is_taken_of_what_top_k_left() -> None:
    """Two tokens of equal mass remain: half of it keeps one, a little more keeps both."""
    logits = torch.tensor([1.0, 1.0, 0.9, 0.9, 0.9]).expand(2000, 5).contiguous()
    position = torch.arange(2000)
    assert set(sample(logits, rows(2000, top_k=2, top_p=0.5, position=position))[0].tolist()) == {0}
    assert set(sample(logits, rows(2000, top_k=2, top_p=0.51, position=position))[0].tolist()) == {0, 1}


def test_zero_temperature_takes_the_largest_logit_and_the_lower_id_of_equal_ones() -> None:
    logits = torch.tensor(
        [[1.0, 3.0, 3.0, 2.0], [0.0, -0.0, -1.0, 0.0], [-0.0, 0.0, -5.0, -7.0], [-5.0, -4.0, -4.0, -6.0]]
    )
    tokens, _ = sample(logits, rows(4, temperature=0.0, top_k=2, top_p=0.1, seed=torch.arange(4)))
    assert tokens.tolist() == [1, 0, 0, 1]


def test_a_greedy_row_is_the_same_beside_a_drawn_one() -> None:
    logits = torch.randn(2, 100)
    together, _ = sample(logits, rows(2, temperature=torch.tensor([0.0, 1.0])))
    assert int(together[0]) == int(sample(logits[:1], rows(1, temperature=0.0))[0]) == int(logits[0].argmax())


def test_keys_are_unique_and_in_the_order_of_logits() -> None:
    logits = torch.cat((torch.randn(500), torch.tensor([-torch.inf, 3e38, -3e38, 1e-45, -1e-45, 0.0, 0.0])))[None]
    keys = token_keys(logits)[0]
    assert len(set(keys.tolist())) == 507
    assert torch.equal(keys.argsort(descending=True), logits[0].sort(descending=True, stable=True).indices)


def test_noise_is_finite_for_every_extreme_hash() -> None:
    noise = gumbel_log2(torch.tensor([0, 1, 2**31, 2**32 - 2, 2**32 - 1]))
    assert bool(torch.isfinite(noise).all())
    assert 32.9 < float(noise[0]) < 33.1 and -4.6 < float(noise[-1]) < float(noise[2]) < 33


def test_noise_depends_on_seed_position_and_token_and_nothing_else() -> None:
    seed, position = torch.tensor([1, 1, 2, -1]), torch.tensor([5, 6, 5, 5])
    bits = noise_bits(seed, position, 100)
    assert torch.equal(noise_bits(seed[2:3], position[2:3], 100)[0], bits[2])
    assert torch.equal(noise_bits(seed, position, 40), bits[:, :40])
    assert len({tuple(row) for row in bits.tolist()}) == 4
    assert int(bits.min()) >= 0 and int(bits.max()) < 2**32


def test_noise_is_splitmix64() -> None:
    """Against the algorithm in plain integers."""
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, position in ((0, 0), (-3, 7), (2**63 - 1, 2**40), (-(2**63), 1)):
        row = mix(((mix((seed + golden) & mask)) + position * golden) & mask)
        expected = [mix((row + (token + 1) * golden) & mask) >> 32 for token in range(5)]
        assert noise_bits(torch.tensor([seed]), torch.tensor([position]), 5)[0].tolist() == expected


def test_logprobs_agree_with_log_softmax_in_fp64_whatever_the_filters() -> None:
    logits, parameters = mixed(48, 272)
    tokens, logprobs = sample(logits, parameters)
    expected = logits.double().log_softmax(1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-6)
    assert logprobs.dtype == torch.float64 and tokens.dtype == torch.int64


def test_a_row_without_a_finite_logit_is_marked() -> None:
    logits = torch.stack((torch.full((9,), -torch.inf), torch.full((9,), torch.nan), torch.zeros(9)))
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 3)):
        tokens, logprobs = sample(logits, rows(3, temperature=temperature, top_k=top_k))
        assert tokens[:2].tolist() == [0, 0] and logprobs[:2].tolist() == [-torch.inf, -torch.inf]
        assert math.isclose(float(logprobs[2]), -math.log(9), abs_tol=1e-7)


def test_nan_counts_as_impossible_and_infinity_as_certain() -> None:
    logits = torch.tensor([[torch.nan, 1.0, 0.5], [-torch.inf, torch.inf, 3.0]]).repeat(500, 1)
    tokens, logprobs = sample(logits, rows(1000, temperature=1.5, position=torch.arange(1000)))
    assert set(tokens[::2].tolist()) == {1, 2} and set(tokens[1::2].tolist()) == {1}
    assert bool((logprobs[1::2] == 0).all())


def test_extreme_temperatures_stay_defined() -> None:
    logits = torch.randn(200, 50)
    position = torch.arange(200)
    tiny, _ = sample(logits, rows(200, temperature=1e-40, position=position))
    assert torch.equal(tiny, logits.argmax(1))
    huge, _ = sample(logits, rows(200, temperature=1e30, position=position))
    assert len(set(huge.tolist())) > 30


def test_a_token_far_below_the_best_is_never_drawn() -> None:
    logits = torch.zeros(1000, 4)
    logits[:, 2] = -1e30
    tokens, _ = sample(logits, rows(1000, position=torch.arange(1000)))
    assert set(tokens.tolist()) == {0, 1, 3}
