"""Triton KDA against the fp64 recurrence and the plain-torch twins: bf16 operands, fp32 state."""

from types import ModuleType

import pytest
import torch

from tests.support.kernels import GATES, relative_rmse, same_bytes

O_RMSE, S_RMSE = 6e-3, 5.5e-3


@pytest.mark.parametrize("gate", GATES)
def test_outputs_and_states_agree_with_fp64(kda: ModuleType, device: torch.device, gate: str) -> None:
    layer = kda.layer_inputs(50, 1, GATES[gate], device)
    state = kda.poisoned_state(1, 1, device)
    kda.start_slot(state, 0, layer)
    (o,) = kda.feed_prefill(state, [(0, layer, 0, 50)])
    expected, _ = kda.fp64_answer(layer, 50)
    _, final = kda.fp64_answer(layer, 48)
    assert relative_rmse(o.cpu(), expected) < O_RMSE
    assert relative_rmse(state.S[0].cpu(), final) < S_RMSE


@pytest.mark.parametrize("gate", GATES)
def test_the_plain_twin_gives_the_same_within_bf16_and_the_same_tails(
    kda: ModuleType, device: torch.device, gate: str
) -> None:
    layer = kda.layer_inputs(37, 1, GATES[gate], device)
    state = kda.poisoned_state(1, 1, device)
    kda.start_slot(state, 0, layer)
    (o,) = kda.feed_prefill(state, [(0, layer, 0, 37)])
    expected, final, ring, grid = kda.twin_answer(layer, 37)
    assert relative_rmse(o.cpu(), expected.double()) < O_RMSE
    assert relative_rmse(state.S[0].cpu(), final.double()) < S_RMSE
    assert same_bytes(state.conv_ring[0].cpu().float(), ring)
    assert same_bytes(state.conv_grid[0].cpu().float(), grid)


def test_keys_that_repeat_cost_no_accuracy(kda: ModuleType, device: torch.device) -> None:
    """Every token the same, beta near 1, no decay: the inverse of a matrix of ones, where powers of it explode."""
    layer = kda.layer_inputs(32, 1, None, device)
    layer.x[:] = layer.x[:1] + 0.02 * torch.randn_like(layer.x)
    layer.z[:] = -30.0
    layer.b[:] = 4.0
    state = kda.poisoned_state(1, 1, device)
    kda.start_slot(state, 0, layer)
    (o,) = kda.feed_prefill(state, [(0, layer, 0, 32)])
    expected, final = kda.fp64_answer(layer, 32)
    assert relative_rmse(o.cpu(), expected) < 2 * O_RMSE
    assert relative_rmse(state.S[0].cpu(), final) < 2 * S_RMSE
