"""Routing: who is chosen, with what weight, and that a row's routes are its own."""

import itertools

import pytest
import torch
from torch import Tensor

from forkpoint.kernels.router.naive import choose, route
from forkpoint.kernels.router.routes import Router
from tests.support.kernels import same_bytes


def router(bias: Tensor, per_token: int, *, hidden: int = 24, **choices: bool | float) -> Router:
    settings = {"renormalize": True, "scaling_factor": 1.0, "biased_weights": False} | choices
    return Router(torch.randn(len(bias), hidden), bias, per_token, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("biased_weights", [False, True])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "per_token"), [(8, 1), (8, 3), (8, 8), (896, 16), (256, 8)])
def test_routes_match_the_formula_in_fp64(
    experts: int, per_token: int, renormalize: bool, biased_weights: bool
) -> None:
    """A bias as large as the scores' own spread, so that many choices follow from it."""
    logits, bias = torch.randn(50, experts), torch.randn(experts) * 0.3
    choices = {"renormalize": renormalize, "biased_weights": biased_weights}
    routes = choose(logits, router(bias, per_token, scaling_factor=2.446, **choices))
    scores = torch.sigmoid(logits.double())
    choice = scores + bias.double()
    moved = 0
    for row in range(50):
        best = sorted(range(experts), key=lambda e: (-float(choice[row, e]), e))[:per_token]
        moved += set(best) != set(scores[row].topk(per_token).indices.tolist())
        assert routes.experts[row].tolist() == sorted(best)
        weights = (choice if biased_weights else scores)[row, sorted(best)]
        if renormalize and per_token > 1:
            weights = weights / (weights.sum() + 1e-20)
        torch.testing.assert_close(routes.weights[row].double(), weights * 2.446, rtol=2e-6, atol=1e-7)
    assert moved > 10 or per_token == experts
    assert routes.experts.dtype == torch.int64 and routes.weights.dtype == torch.float32


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_ties_go_to_the_lower_id(zero: float) -> None:
    """Among equal scores, zeros of either sign, and scores that only the bias makes equal."""
    logits = torch.full((1, 8), zero)
    assert choose(logits, router(torch.zeros(8), 3)).experts.tolist() == [[0, 1, 2]]
    vanished = torch.full((1, 8), -200.0)
    assert choose(vanished, router(torch.full((8,), zero), 3)).experts.tolist() == [[0, 1, 2]]
    bias = torch.tensor([-0.5, 0.0, 0.25, 0.0, 0.25, -0.5, 0.25, 0.25])
    assert choose(logits, router(bias, 3)).experts.tolist() == [[2, 4, 6]]
    assert choose(logits, router(bias, 5)).experts.tolist() == [[1, 2, 4, 6, 7]]


def test_every_pair_that_ties_for_the_last_place_gives_it_to_the_lower_id() -> None:
    for first, second in itertools.combinations(range(6), 2):
        logits = torch.full((1, 6), -4.0)
        logits[0, [first, second]] = 1.0
        assert choose(logits, router(torch.zeros(6), 1)).experts.tolist() == [[first]]


def test_weights_that_all_vanish_stay_numbers() -> None:
    routes = choose(torch.full((2, 4), -200.0), router(torch.zeros(4), 2))
    assert routes.weights.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_one_expert_a_token_keeps_its_score() -> None:
    """Published code renormalises only when a token has more than one."""
    logits = torch.randn(20, 8)
    routes = choose(logits, router(torch.zeros(8), 1, scaling_factor=2.0))
    torch.testing.assert_close(routes.weights[:, 0], 2.0 * torch.sigmoid(logits).amax(1))


@pytest.mark.parametrize(("experts", "per_token"), [(8, 3), (256, 8)])
def test_a_rows_routes_depend_on_that_row_alone(experts: int, per_token: int) -> None:
    x, gate = torch.randn(67, 64), router(torch.randn(experts) * 0.1, per_token, hidden=64)
    whole = route(x, gate)
    for rows in (slice(0, 1), slice(66, 67), slice(3, 20), slice(1, 66)):
        alone = route(x[rows], gate)
        assert torch.equal(alone.experts, whole.experts[rows]) and same_bytes(alone.weights, whole.weights[rows])
    turned = torch.randperm(67)
    mixed = route(x[turned], gate)
    assert torch.equal(mixed.experts, whole.experts[turned]) and same_bytes(mixed.weights, whole.weights[turned])
