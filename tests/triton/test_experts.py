"""Experts in Triton: a row's bits are the same alone, among any rows, in any tile, and MXFP4 is decoded exactly."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

import triton
import triton.language as tl

from forkpoint.kernels.experts import naive
from forkpoint.kernels.experts.configs import DENSE, PACKED, ExpertTile, ExpertTiles, tiles_for, tiles_max
from forkpoint.kernels.experts.mxfp4 import unpack
from forkpoint.kernels.experts.triton import launch, places
from forkpoint.kernels.experts.triton.mxfp4 import decode
from forkpoint.kernels.experts.weights import ExpertMatrix, Experts
from forkpoint.kernels.ffn.activation import SILU, Activation
from forkpoint.kernels.router.routes import Routes
from tests.support.kernels import at_offset, relative_rmse
from tests.support.triton_shim import DEVICE

SITU = Activation("situ", beta=4.0, linear_beta=25.0)
BF16 = torch.bfloat16
COUNT, WIDTH, INNER, PER_TOKEN = 5, 64, 32, 3
FORMATS = pytest.mark.parametrize("packed", [False, True], ids=["bf16", "mxfp4"])


def square(rows: int, columns: int, swapped: bool) -> ExpertTiles:
    tile = ExpertTile(rows, columns, warps=4, stages=2, swapped=swapped)
    return ExpertTiles(1, tile, tile)


SMALL = square(16, 64, swapped=True)
"""Few programs: each costs the interpreter tens of milliseconds."""


def weights(packed: bool, width: int = WIDTH, inner: int = INNER) -> Experts:
    generator = torch.Generator().manual_seed(7)

    def matrix(outputs: int, inputs: int) -> ExpertMatrix:
        if not packed:
            values = torch.randn(COUNT, outputs, inputs, generator=generator) * inputs**-0.5
            return ExpertMatrix(values.to(DEVICE, BF16))
        values = torch.randint(0, 256, (COUNT, outputs, inputs // 2), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 124, (COUNT, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
        return ExpertMatrix(values.to(DEVICE), scales.to(DEVICE))

    return Experts(matrix(2 * inner, width), matrix(width, inner))


def unpacked(experts: Experts, dtype: torch.dtype) -> Experts:
    """Dense weights with the same numbers."""

    def matrix(each: ExpertMatrix) -> ExpertMatrix:
        values = each.values if each.scales is None else unpack(each.values, each.scales)
        return ExpertMatrix(values.to(dtype))

    return Experts(matrix(experts.gate_up), matrix(experts.down))


def rows_of(count: int, width: int = WIDTH) -> tuple[Tensor, Routes, Tensor]:
    """x, routes and shared rows; most rows go to the first experts, and one expert has none."""
    generator = torch.Generator().manual_seed(8)
    x, shared = (torch.randn(count, width, generator=generator).to(DEVICE, BF16) for _ in range(2))
    chance = torch.tensor([8.0, 4.0, 1.0, 0.0, 1.0]).expand(count, -1)
    experts = torch.multinomial(chance, PER_TOKEN, generator=generator).sort(dim=1).values.to(DEVICE)
    return x, Routes(experts, torch.rand(count, PER_TOKEN, generator=generator).to(DEVICE)), shared


def some(routes: Routes, rows: Tensor | slice) -> Routes:
    return Routes(routes.experts[rows].contiguous(), routes.weights[rows].contiguous())


@FORMATS
def test_a_row_has_the_same_bits_alone_and_among_any_rows(packed: bool) -> None:
    experts = weights(packed)
    x, routes, shared = rows_of(20)
    whole = launch.experts_sum(x, routes, experts, SITU, shared, SMALL)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    for part in (slice(0, 1), order):
        again = launch.experts_sum(x[part], some(routes, part), experts, SITU, shared[part], SMALL)
        assert torch.equal(again, whole[part])
    assert torch.equal(
        launch.experts_sum(at_offset(x, 1)[3:5], some(routes, slice(3, 5)), experts, SITU, shared[3:5]), whole[3:5]
    )


@FORMATS
def test_poisoned_rows_and_experts_reach_no_other_row(packed: bool) -> None:
    experts = weights(packed)
    x, routes, shared = rows_of(18)
    clean = launch.experts_sum(x, routes, experts, SILU, shared, SMALL)
    x[4], shared[5], routes.weights[6] = torch.nan, torch.nan, torch.nan
    for matrix in (experts.gate_up, experts.down):
        if matrix.scales is None:
            matrix.values[3] = torch.nan
        else:
            matrix.scales[3] = 255
    poisoned = launch.experts_sum(x, routes, experts, SILU, shared, SMALL)
    assert poisoned[4:7].isnan().all()
    keep = [row for row in range(18) if row not in (4, 5, 6)]
    assert torch.equal(poisoned[keep], clean[keep])


@FORMATS
def test_every_tile_gives_the_same_bits(packed: bool) -> None:
    experts = weights(packed, inner=48 if not packed else 32)
    x, routes, _ = rows_of(19)
    first = launch.experts_sum(x, routes, experts, SILU, tiles=SMALL)
    for other in (square(32, 32, swapped=False), square(16, 32, swapped=True)):
        assert torch.equal(launch.experts_sum(x, routes, experts, SILU, tiles=other), first)


@FORMATS
@pytest.mark.parametrize("activation", [SILU, SITU, replace(SITU, linear_beta=None)], ids=["silu", "situ", "uncapped"])
def test_the_sum_is_that_of_the_definition(activation: Activation, packed: bool) -> None:
    """Rounded to bf16 three times: what an expert has inside, its row, and the sum."""
    experts = weights(packed)
    x, routes, shared = rows_of(5)
    ours = launch.experts_sum(x, routes, experts, activation, shared, SMALL)
    exact = naive.experts_sum(x.double(), routes, unpacked(experts, torch.float64), activation, shared.double())
    assert relative_rmse(ours, exact) < 4e-3
    assert ours.dtype == BF16


def test_packed_experts_give_the_bits_of_dense_ones_with_the_same_numbers() -> None:
    experts = weights(packed=True)
    x, routes, shared = rows_of(6)
    dense = launch.experts_sum(x, routes, unpacked(experts, BF16), SITU, shared, SMALL)
    assert torch.equal(launch.experts_sum(x, routes, experts, SITU, shared, SMALL), dense)


@triton.jit
def decode_kernel(values, scales, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    packed = tl.load(values + row * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)[None, :])
    scale = tl.load(scales + row * (COLUMNS // 32) + tl.arange(0, COLUMNS // 32)[None, :])
    elements = decode(packed, scale, ROWS, COLUMNS)
    tl.store(out + row * COLUMNS + tl.arange(0, COLUMNS)[None, :], elements)


def test_every_byte_under_every_scale_is_decoded_to_the_bit() -> None:
    """Among them subnormal numbers, both zeros, what is beyond bf16's range, and NaN."""
    values = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8, device=DEVICE)[:, None].repeat(1, 16)
    ours = torch.empty((256, 512), dtype=BF16, device=DEVICE)
    decode_kernel[(16,)](values, scales, ours, ROWS=16, COLUMNS=512)
    exact = unpack(values.cpu(), scales.cpu())
    theirs = exact.to(BF16)
    assert torch.equal(theirs.float().nan_to_num(7.0), exact.nan_to_num(7.0)), "a bf16 number each"
    assert torch.equal(ours.cpu().isnan(), theirs.isnan())
    number = ~theirs.isnan()
    assert torch.equal(ours.cpu()[number].view(torch.int16), theirs[number].view(torch.int16))


@pytest.mark.parametrize("chunk", [1024, 32])
def test_choices_are_sorted_by_expert_and_every_tile_is_one_experts(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(places, "CHUNK", chunk)
    for experts in (rows_of(37)[1].experts, torch.full((40, 1), 2, device=DEVICE)):
        found = places.sort_by_expert(experts.contiguous(), COUNT, 16)
        flat = experts.flatten()
        assert torch.equal(found.order.long(), torch.sort(flat, stable=True).indices)
        expected = []
        for expert in range(COUNT):
            begin, end = int((flat < expert).sum()), int((flat <= expert).sum())
            expected += [[expert, first, end] for first in range(begin, end, 16)]
        assert found.tiles[: int(found.used)].tolist() == expected
        assert len(expected) <= found.tiles.shape[0]


def test_the_bound_on_tiles_holds_for_the_worst_choice() -> None:
    assert tiles_max(assigned=1, experts=256, rows=16) == 1
    assert tiles_max(assigned=8, experts=256, rows=16) == 8
    # One row each, and all others to one: 15 fill its tile, 32 need two more.
    assert tiles_max(assigned=4 + 15 + 32, experts=4, rows=16) == 4 + 2
    assert tiles_max(assigned=4 + 15 + 33, experts=4, rows=16) == 4 + 3


def test_the_combination_adds_in_ascending_order_and_rounds_once() -> None:
    _, routes, shared = rows_of(4)
    y = torch.randn(4, PER_TOKEN, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE, BF16)
    total = routes.weights[:, :1] * y[:, 0].float()
    for place in range(1, PER_TOKEN):
        total = total + routes.weights[:, place : place + 1] * y[:, place].float()
    assert torch.equal(launch.combine(y, routes.weights, None), total.to(BF16))
    assert torch.equal(launch.combine(y, routes.weights, shared), (total + shared.float()).to(BF16))


def test_no_rows_need_no_experts() -> None:
    x, routes, shared = rows_of(3)
    empty = launch.experts_sum(x[:0], some(routes, slice(0, 0)), weights(packed=False), SILU, shared[:0])
    assert empty.shape == (0, WIDTH)


def test_pinned_tiles_follow_the_rows_an_expert_gets() -> None:
    assert tiles_for(8, 256, packed=False) is DENSE[0]
    assert tiles_for(8192 * 8, 256, packed=False) is DENSE[-1]
    assert tiles_for(1024 * 16, 896, packed=True) is PACKED[1]
    assert [tiles.rows_max for tiles in DENSE] == sorted(tiles.rows_max for tiles in DENSE)


def test_experts_say_why_they_refuse() -> None:
    x, routes, shared = rows_of(3)
    experts = weights(packed=True)
    assert launch.why_not(x, routes, experts, shared) is None
    assert "bf16" in str(launch.why_not(x.float(), routes, experts))
    assert "shared" in str(launch.why_not(x, routes, experts, shared[:2]))
    assert "routes" in str(launch.why_not(x[:2], routes, experts))
    assert "routes" in str(launch.why_not(x, replace(routes, weights=routes.weights.double()), experts))
    assert "the other is not" in str(launch.why_not(x, routes, replace(experts, down=weights(packed=False).down)))
    moved = ExpertMatrix(at_offset(weights(packed=False).down.values, 1))
    assert "16 bytes" in str(launch.why_not(x, routes, replace(weights(packed=False), down=moved)))
    with pytest.raises(ValueError, match="gate_up is"):
        launch.experts_sum(x[:, :32].contiguous(), routes, experts, SILU)
    assert launch.why_not_sizes(896, 16, 3584, 3072) is launch.why_not_sizes(256, 8, 2304, 1024) is None
    assert "multiples of 8" in str(launch.why_not_sizes(256, 8, 2300, 1024))
    assert "1 to 1024" in str(launch.why_not_sizes(2000, 8, 2304, 1024))
