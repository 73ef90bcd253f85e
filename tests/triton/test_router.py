"""Routing in Triton: the twin's choice, its ties, ascending experts, and rows that know nothing of each other."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.router import naive
from forkpoint.kernels.router import triton as router
from forkpoint.kernels.router.routes import Router, Routes
from tests.support.triton_shim import DEVICE

EXPERTS, PER_TOKEN = 13, 4


def a_router(*, biased: bool = False, renormalize: bool = True, per_token: int = PER_TOKEN) -> Router:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(EXPERTS, 64, generator=generator).to(DEVICE, torch.bfloat16)
    bias = 0.1 * torch.randn(EXPERTS, generator=generator).to(DEVICE)
    return Router(weight, bias, per_token, renormalize, scaling_factor=2.446, biased_weights=biased)


def logits(rows: int) -> Tensor:
    """On a grid so coarse that no two choices are nearer than two exponentials differ, unless they are equal."""
    generator = torch.Generator().manual_seed(4)
    return (torch.randn(rows, EXPERTS, generator=generator) * 64).round().div(64).to(DEVICE)


def same(a: Routes, b: Routes) -> bool:
    return torch.equal(a.experts, b.experts) and torch.equal(a.weights, b.weights)


@pytest.mark.parametrize("options", [{}, {"biased": True}, {"renormalize": False}, {"per_token": 1}])
def test_routes_are_those_of_the_definition(options: dict[str, bool | int]) -> None:
    gate = a_router(**options)  # type: ignore[arg-type]
    ours, theirs = router.choose(logits(6), gate), naive.choose(logits(6), gate)
    assert torch.equal(ours.experts, theirs.experts)
    assert (ours.experts.diff(dim=1) > 0).all()
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-6, atol=0)


def test_equal_choices_go_to_the_lower_expert_ids_and_negative_zero_is_zero() -> None:
    gate = a_router()
    gate.bias.zero_()
    rows = torch.zeros(2, EXPERTS, device=DEVICE)
    rows[1, [2, 7, 9]] = 1.0
    assert router.choose(rows, gate).experts.tolist() == [[0, 1, 2, 3], [0, 2, 7, 9]]
    gate.bias.fill_(-0.5)  # choices are 0
    gate.bias[:2] = -0.75
    assert router.choose(rows, gate).experts.tolist() == [[2, 3, 4, 5], [2, 3, 7, 9]]


def test_what_differs_from_the_definition_in_the_last_bit_is_the_sigmoid_alone() -> None:
    """Exponentials of two machines differ by an ulp, so near-equal experts may change places between them. Here every
    chosen expert is as good as every other one, up to that."""
    gate = a_router()
    generator = torch.Generator().manual_seed(5)
    rows = 1e-7 * torch.randn(8, EXPERTS, generator=generator).to(DEVICE)
    gate.bias.zero_()
    chosen = router.choose(rows, gate).experts
    choices = torch.sigmoid(rows.double())
    worst = choices.gather(1, chosen).amin(dim=1)
    best_left = choices.scatter(1, chosen, 0.0).amax(dim=1)
    assert (worst >= best_left - 2e-7).all()


def test_a_row_is_routed_alike_alone_and_among_any_rows() -> None:
    gate, rows = a_router(), logits(7)
    whole = router.choose(rows, gate)
    order = torch.tensor([5, 0, 2], device=DEVICE)
    assert same(router.choose(rows[order], gate), Routes(whole.experts[order], whole.weights[order]))
    rows[3] = torch.nan
    keep = [0, 1, 2, 4, 5, 6]
    poisoned = router.choose(rows, gate)
    assert same(
        Routes(poisoned.experts[keep], poisoned.weights[keep]), Routes(whole.experts[keep], whole.weights[keep])
    )


def test_a_poisoned_row_goes_to_experts_that_exist() -> None:
    """Its choices are addresses later on."""
    gate, rows = a_router(), logits(3)
    rows[0] = torch.nan
    rows[1, 5], rows[1, 6] = -torch.nan, torch.inf
    rows[2] = -torch.inf
    assert torch.equal(router.choose(rows, gate).experts, naive.choose(rows, gate).experts)


def test_routes_of_rows_are_those_of_their_fp32_logits() -> None:
    gate = a_router()
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(6)).to(DEVICE, torch.bfloat16)
    exact = x.double() @ gate.weight.double().T
    assert torch.equal(router.route(x, gate).experts, naive.choose(exact.float(), gate).experts)
    assert router.route(x[:0], gate).experts.shape == (0, PER_TOKEN)


def test_the_router_says_why_it_refuses() -> None:
    assert router.why_not(a_router()) is None
    assert "1 to 13" in str(router.why_not(a_router(per_token=14)))
    wide = Router(torch.empty(2000, 8), torch.zeros(2000), 8, True, 1.0)
    assert "1 to 1024" in str(router.why_not(wide))
    with pytest.raises(ValueError, match="fp32"):
        router.choose(logits(2).double(), a_router())
