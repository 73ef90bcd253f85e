"""The short convolution: its definition, its two tails, and the same bytes however a sequence is cut or packed."""

import pytest
import torch
from torch import Tensor

from forkpoint.kernels.conv.naive import causal_conv
from forkpoint.kernels.elementwise import silu
from tests.support.kernels import same_bytes

CHANNELS = 10
NAN = float("nan")


def pools(slots: int) -> tuple[Tensor, Tensor]:
    return torch.full((slots, 4, CHANNELS), NAN), torch.full((slots, 3, CHANNELS), NAN)


def whole_conv(x: Tensor, weight: Tensor) -> Tensor:
    """The definition, over one sequence from position 0."""
    padded = torch.cat((torch.zeros(3, CHANNELS), x))
    total = padded[: len(x)] * weight[:, 0]
    for tap in (1, 2, 3):
        total = total + padded[tap : tap + len(x)] * weight[:, tap]
    return silu(total)


def run(x: Tensor, weight: Tensor, cuts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    ring, grid = pools(3)
    outputs: list[Tensor] = []
    position = 0
    for length in cuts:
        rows = x[position : position + length]
        outputs.append(causal_conv(rows, weight, ring, grid, [1], [0, length], [position]))
        position += length
    return torch.cat(outputs), ring, grid


def test_it_agrees_with_torch_convolution() -> None:
    x, weight = torch.randn(50, CHANNELS), torch.randn(CHANNELS, 4)
    y, _, _ = run(x, weight, [50])
    expected = torch.nn.functional.conv1d(x.t()[None].double(), weight[:, None].double(), padding=3, groups=CHANNELS)
    torch.testing.assert_close(y.double(), torch.nn.functional.silu(expected[0, :, :50].t()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "cuts", [[41], [1] * 41, [2, 39], [3, 1, 37], [16, 16, 9], [15, 1, 1, 24], [0, 5, 0, 36], [17, 24]]
)
def test_any_cut_gives_the_same_bytes_and_tails(cuts: list[int]) -> None:
    x, weight = torch.randn(41, CHANNELS), torch.randn(CHANNELS, 4)
    y, ring, grid = run(x, weight, cuts)
    assert same_bytes(y, whole_conv(x, weight))
    for position in (37, 38, 39, 40):
        assert same_bytes(ring[1, position % 4], x[position])
    assert same_bytes(grid[1], x[29:32])
    assert bool(ring[[0, 2]].isnan().all()) and bool(grid[[0, 2]].isnan().all())


@pytest.mark.parametrize("end", [1, 2, 3, 15, 16, 17, 18, 19, 31, 32, 33])
def test_the_grid_tail_holds_the_inputs_before_the_last_closed_tile(end: int) -> None:
    x, weight = torch.randn(end, CHANNELS), torch.randn(CHANNELS, 4)
    for cuts in ([end], [1] * end):
        _, ring, grid = run(x, weight, cuts)
        closed = end // 16 * 16
        if closed:
            assert same_bytes(grid[1], x[closed - 3 : closed])
        else:
            assert bool(grid.isnan().all())
        for position in range(max(0, end - 4), end):
            assert same_bytes(ring[1, position % 4], x[position])


def test_a_packed_batch_equals_each_sequence_alone() -> None:
    weight = torch.randn(CHANNELS, 4)
    lengths = [(0, 1), (1, 1), (2, 40), (16, 17), (15, 16), (31, 35), (7, 7), (0, 33)]
    slots = [4, 9, 0, 2, 8, 6, 1, 5]
    sequences = [torch.randn(60, CHANNELS) for _ in lengths]
    ring, grid = pools(10)

    def step(borders: list[tuple[int, int]]) -> list[Tensor]:
        rows = torch.cat([x[a:b] for x, (a, b) in zip(sequences, borders, strict=True)])
        cu_seqlens = [0]
        for a, b in borders:
            cu_seqlens.append(cu_seqlens[-1] + b - a)
        y = causal_conv(rows, weight, ring, grid, slots, cu_seqlens, [a for a, _ in borders])
        return list(torch.split(y, [b - a for a, b in borders]))

    outputs = [step([(0, a) for a, _ in lengths]), step(lengths), step([(b, b + 5) for _, b in lengths])]
    for n, (slot, (_, end)) in enumerate(zip(slots, lengths, strict=True)):
        whole, alone_ring, alone_grid = run(sequences[n], weight, [end + 5])
        assert same_bytes(torch.cat([o[n] for o in outputs]), whole)
        assert same_bytes(grid[slot], alone_grid[1])
        for position in range(max(0, end + 1), end + 5):
            assert same_bytes(ring[slot, position % 4], alone_ring[1, position % 4])
    assert bool(ring[[3, 7]].isnan().all()) and bool(grid[[3, 7]].isnan().all())


def test_inputs_before_the_start_are_zero_whatever_the_ring_holds() -> None:
    x, weight = torch.randn(6, CHANNELS), torch.randn(CHANNELS, 4)
    ring, grid = pools(2)
    assert bool(torch.isfinite(causal_conv(x[:2], weight, ring, grid, [0], [0, 2], [0])).all())
    assert same_bytes(causal_conv(x[2:], weight, ring, grid, [0], [0, 4], [2]), whole_conv(x, weight)[2:])


def test_a_restored_tail_continues_as_if_never_stopped() -> None:
    """The live ring after a restore at s is the grid tail: inputs of s-3..s-1 at their places."""
    x, weight = torch.randn(40, CHANNELS), torch.randn(CHANNELS, 4)
    whole, _, grid = run(x, weight, [40])
    ring, fresh = pools(3)
    for place, position in enumerate(range(29, 32)):
        ring[1, position % 4] = grid[1, place]
    assert same_bytes(causal_conv(x[32:], weight, ring, fresh, [1], [0, 8], [32]), whole[32:])


def test_two_sequences_may_not_share_a_slot() -> None:
    ring, grid = pools(2)
    with pytest.raises(ValueError, match="two sequences share a slot"):
        causal_conv(torch.zeros(2, CHANNELS), torch.zeros(CHANNELS, 4), ring, grid, [1, 1], [0, 1, 2], [0, 0])


def test_no_rows_change_nothing() -> None:
    ring, grid = pools(1)
    assert causal_conv(torch.empty(0, CHANNELS), torch.randn(CHANNELS, 4), ring, grid, [0], [0, 0], [5]).shape[0] == 0
    assert bool(ring.isnan().all())
