"""The sum over experts: against fp64, and a row among others against the row alone."""

import pytest
import torch
from torch import Tensor

from forkpoint.kernels.experts.naive import experts_sum, matrix
from forkpoint.kernels.experts.weights import ExpertMatrix, Experts
from forkpoint.kernels.ffn.activation import SILU, Activation
from forkpoint.kernels.router.routes import Routes
from tests.support.kernels import same_bytes

EXPERTS, WIDTH, INNER, PER_TOKEN = 6, 64, 96, 3
SITU = Activation("situ", 1.5, 2.0)


def weights(packed: bool) -> Experts:
    if not packed:
        shapes = (EXPERTS, 2 * INNER, WIDTH), (EXPERTS, WIDTH, INNER)
        return Experts(*(ExpertMatrix(torch.randn(shape) / shape[2] ** 0.5) for shape in shapes))

    def mxfp4(outputs: int, inputs: int) -> ExpertMatrix:
        values = torch.randint(0, 256, (EXPERTS, outputs, inputs // 2), dtype=torch.uint8)
        return ExpertMatrix(values, torch.randint(120, 125, (EXPERTS, outputs, inputs // 32), dtype=torch.uint8))

    return Experts(mxfp4(2 * INNER, WIDTH), mxfp4(WIDTH, INNER))


def routes_of(rows: int) -> Routes:
    chosen = torch.stack([torch.randperm(EXPERTS)[:PER_TOKEN].sort().values for _ in range(rows)])
    return Routes(chosen, torch.rand(rows, PER_TOKEN))


def some(routes: Routes, rows: Tensor | slice) -> Routes:
    return Routes(routes.experts[rows], routes.weights[rows])


def in_fp64(x: Tensor, routes: Routes, experts: Experts, activation: Activation) -> Tensor:
    out = torch.zeros_like(x, dtype=torch.float64)
    for row in range(len(x)):
        for expert, weight in zip(routes.experts[row].tolist(), routes.weights[row].double(), strict=True):
            gate, up = (matrix(experts.gate_up, expert).double() @ x[row].double()).chunk(2)
            if activation.name == "silu":
                hidden = gate * torch.sigmoid(gate) * up
            else:
                hidden = 1.5 * torch.tanh(gate / 1.5) * torch.sigmoid(gate) * 2.0 * torch.tanh(up / 2.0)
            out[row] += weight * (matrix(experts.down, expert).double() @ hidden)
    return out


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "mxfp4"])
@pytest.mark.parametrize("activation", [SILU, SITU], ids=["silu", "situ"])
def test_the_sum_agrees_with_fp64(packed: bool, activation: Activation) -> None:
    x, routes, experts, shared = torch.randn(20, WIDTH), routes_of(20), weights(packed), torch.randn(20, WIDTH)
    expected = in_fp64(x, routes, experts, activation)
    scale = float(expected.abs().max())
    alone = experts_sum(x, routes, experts, activation, None)
    torch.testing.assert_close(alone.double(), expected, rtol=0, atol=2e-6 * scale)
    both = experts_sum(x, routes, experts, activation, shared)
    torch.testing.assert_close(both.double(), expected + shared.double(), rtol=0, atol=2e-6 * scale)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "mxfp4"])
def test_a_rows_sum_depends_on_that_row_alone(packed: bool) -> None:
    """In any company: alone, among a few, in another order, twice."""
    x, routes, experts, shared = torch.randn(41, WIDTH), routes_of(41), weights(packed), torch.randn(41, WIDTH)

    def summed(rows: Tensor | slice) -> Tensor:
        return experts_sum(x[rows], some(routes, rows), experts, SITU, shared[rows])

    whole = summed(slice(None))
    for rows in (slice(0, 1), slice(40, 41), slice(5, 7), slice(3, 20), slice(1, 41)):
        assert same_bytes(summed(rows), whole[rows])
    turned, twice = torch.randperm(41), torch.tensor([7, 7, 0, 7, 40, 0] * 4)
    assert same_bytes(summed(turned), whole[turned])
    assert same_bytes(summed(twice), whole[twice])


def test_whom_the_others_go_to_changes_nothing() -> None:
    """The first row's experts have from one to twenty rows, the others' some or none."""
    x, experts = torch.randn(20, WIDTH), weights(packed=False)
    own, shares = torch.tensor([1, 2, 4]), torch.rand(20, PER_TOKEN)
    alone = experts_sum(x[:1], Routes(own[None], shares[:1]), experts, SILU, None)
    for others in ([1, 2, 4], [0, 3, 5], [0, 1, 2], [3, 4, 5]):
        routes = Routes(torch.tensor([own.tolist(), *([others] * 19)]), shares)
        assert same_bytes(experts_sum(x, routes, experts, SILU, None)[:1], alone)


def test_an_expert_that_nobody_goes_to_is_not_read() -> None:
    x, experts = torch.randn(9, WIDTH), weights(packed=False)
    routes = Routes(torch.tensor([[0, 1, 2]] * 9), torch.rand(9, PER_TOKEN))
    whole = experts_sum(x, routes, experts, SILU, None)
    for stack in (experts.gate_up.values, experts.down.values):
        stack[3:] = torch.nan
    assert same_bytes(experts_sum(x, routes, experts, SILU, None), whole)


def test_no_rows_give_no_rows() -> None:
    nobody = Routes(torch.empty(0, PER_TOKEN, dtype=torch.int64), torch.empty(0, PER_TOKEN))
    assert experts_sum(torch.empty(0, WIDTH), nobody, weights(packed=True), SITU, None).shape == (0, WIDTH)


def test_a_row_that_is_no_number_stays_alone() -> None:
    x, routes, experts = torch.randn(17, WIDTH), routes_of(17), weights(packed=True)
    whole = experts_sum(x, routes, experts, SITU, None)
    x[3] = torch.nan
    damaged = experts_sum(x, routes, experts, SITU, None)
    assert bool(damaged[3].isnan().all())
    others = torch.tensor([row for row in range(17) if row != 3])
    assert same_bytes(damaged[others], whole[others])
