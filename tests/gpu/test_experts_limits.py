"""Experts, router and mixture on tensors of more than 2^31 values: the last rows are what they are alone."""

import pytest
import torch
from torch import Tensor

from tests.support.gpu import require_gpu

require_gpu()

from forkpoint.kernels.attn_res import triton as attn_res
from forkpoint.kernels.experts.configs import DENSE, PACKED, ExpertTiles
from forkpoint.kernels.experts.triton import launch
from forkpoint.kernels.experts.weights import ExpertMatrix, Experts
from forkpoint.kernels.ffn.activation import SILU, Activation
from forkpoint.kernels.router import triton as router
from forkpoint.kernels.router.routes import Router, Routes
from tests.support.kernels import same_bytes

VALUES = 1 << 31
BF16 = torch.bfloat16
SITU = Activation("situ", 4.0, 25.0)


def weights(experts: int, width: int, inner: int, packed: bool, device: torch.device) -> Experts:
    """Random ones; each expert's differ."""

    def matrix(outputs: int, inputs: int) -> ExpertMatrix:
        if packed:
            values = torch.empty((experts, outputs, inputs // 2), dtype=torch.uint8, device=device).random_(0, 256)
            scales = torch.empty((experts, outputs, inputs // 32), dtype=torch.uint8, device=device).random_(118, 123)
            return ExpertMatrix(values, scales)
        values = torch.empty((experts, outputs, inputs), dtype=BF16, device=device)
        return ExpertMatrix(values.normal_(std=inputs**-0.5))

    return Experts(matrix(2 * inner, width), matrix(width, inner))


def routes_of(rows: int, experts: int, per_token: int, device: torch.device) -> Routes:
    scores = torch.rand((rows, experts), device=device)
    chosen = scores.topk(per_token, dim=1).indices.sort(dim=1).values
    return Routes(chosen, torch.rand((rows, per_token), device=device))


def some(routes: Routes, rows: slice) -> Routes:
    return Routes(routes.experts[rows].contiguous(), routes.weights[rows].contiguous())


def alone(x: Tensor, routes: Routes, held: Experts, activation: Activation, rows: slice) -> Tensor:
    return launch.experts_sum(x[rows].clone(), some(routes, rows), held, activation)


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "mxfp4"])
def test_choices_times_columns_beyond_2_31(packed: bool, device: torch.device) -> None:
    """Both what is inside and what comes out of the experts has more values than int32 counts."""
    rows, width, inner = 75_000, 2048, 2048
    held = weights(16, width, inner, packed, device)
    x, routes = torch.randn((rows, width), device=device).to(BF16), routes_of(rows, 16, 14, device)
    assert rows * 14 * inner > VALUES
    out = launch.experts_sum(x, routes, held, SITU)
    for part in (slice(0, 3), slice(rows - 3, rows)):
        assert same_bytes(out[part], alone(x, routes, held, SITU, part))


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "mxfp4"])
def test_weights_beyond_2_31_values_are_those_of_the_expert(packed: bool, device: torch.device) -> None:
    experts, width, inner = 640, 2048, 1024
    held = weights(experts, width, inner, packed, device)
    assert experts * 2 * inner * width > VALUES
    last = Experts(*(ExpertMatrix(m.values[-8:].clone(), None if m.scales is None else m.scales[-8:].clone())
                     for m in (held.gate_up, held.down)))  # fmt: skip
    x, routes = torch.randn((40, width), device=device).to(BF16), routes_of(40, 8, 4, device)
    moved = Routes(routes.experts + experts - 8, routes.weights)
    assert same_bytes(launch.experts_sum(x, moved, held, SILU), launch.experts_sum(x, routes, last, SILU))


@pytest.mark.parametrize("tiles", [*DENSE, *PACKED], ids=str)
def test_every_pinned_tile_gives_the_same_bytes(tiles: ExpertTiles, device: torch.device) -> None:
    packed = tiles in PACKED
    held = weights(12, 1152, 320, packed, device)
    x, routes = torch.randn((700, 1152), device=device).to(BF16), routes_of(700, 12, 5, device)
    first = launch.experts_sum(x, routes, held, SITU, tiles=(PACKED if packed else DENSE)[0])
    for rows in (slice(0, 1), slice(300, 317), slice(0, 700)):
        again = launch.experts_sum(x[rows], some(routes, rows), held, SITU, tiles=tiles)
        assert same_bytes(again, first[rows])


def test_packed_experts_give_the_bytes_of_dense_ones_with_the_same_numbers(device: torch.device) -> None:
    from forkpoint.kernels.experts.mxfp4 import unpack

    held = weights(8, 512, 320, True, device)
    dense = Experts(*(ExpertMatrix(unpack(m.values, m.scales).to(BF16))
                      for m in (held.gate_up, held.down) if m.scales is not None))  # fmt: skip
    x, routes = torch.randn((900, 512), device=device).to(BF16), routes_of(900, 8, 3, device)
    assert same_bytes(launch.experts_sum(x, routes, held, SITU), launch.experts_sum(x, routes, dense, SITU))


def test_logits_beyond_2_31_are_routed(device: torch.device) -> None:
    rows, experts = VALUES // 896 + 500, 896
    gate = Router(torch.empty((experts, 8), device=device), torch.randn(experts, device=device), 16, True, 1.0)
    logits = torch.zeros((rows, experts), device=device)
    logits[-4:] = torch.randn((4, experts), device=device)
    whole, few = router.choose(logits, gate), router.choose(logits[-4:].clone(), gate)
    assert torch.equal(whole.experts[-4:], few.experts)
    assert same_bytes(whole.weights[-4:], few.weights)


def test_a_bank_beyond_2_31_is_mixed(device: torch.device) -> None:
    rows, width = VALUES // (8 * 7168) + 300, 7168
    bank = torch.zeros((8, rows, width), device=device)
    bank[:, -4:] = torch.randn((8, 4, width), device=device)
    x, weight = torch.randn((rows, width), device=device), torch.randn(width, device=device)
    whole = attn_res.mix_norm(bank, x, None, weight, weight, 1e-5, BF16)[1]
    few = attn_res.mix_norm(bank[:, -4:].clone(), x[-4:].clone(), None, weight, weight, 1e-5, BF16)[1]
    assert same_bytes(whole[-4:], few)
