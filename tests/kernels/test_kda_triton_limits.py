"""What the Triton KDA kernels refuse, and where their plans put rows; needs no triton."""

import importlib.util

import pytest
import torch

from forkpoint.kernels.kda.triton import limits
from forkpoint.kernels.kda.triton.plan import NULL_SLOT, decode_facts, prefill_plan

CPU = torch.device("cpu")
HOPPER = (9, 0)


def test_every_refusal_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert limits.why_not(128, 128, -5.0, torch.float32, HOPPER) is None
    assert limits.why_not(128, 128, None, torch.bfloat16, HOPPER) is None
    assert "8.0" in (limits.why_not(128, 128, None, torch.float32, (8, 0)) or "")
    assert "64" in (limits.why_not(64, 128, None, torch.float32, HOPPER) or "")
    assert "-20.0" in (limits.why_not(128, 128, -20.0, torch.float32, HOPPER) or "")
    assert "float16" in (limits.why_not(128, 128, None, torch.float16, HOPPER) or "")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in (limits.why_not(128, 128, None, torch.float32, HOPPER) or "")


def test_one_reference_is_for_gates_that_fit_it() -> None:
    assert not limits.needs_two_references(-5.0)
    assert limits.needs_two_references(-5.5)
    assert limits.needs_two_references(None)


def test_rows_of_other_shapes_or_scattered_values_are_refused() -> None:
    x, z, b = torch.zeros(2, 400)[:, :384], torch.zeros(2, 128), torch.zeros(2, 1)
    limits.check_rows(x, z, b, 1)
    with pytest.raises(ValueError, match="x must be"):
        limits.check_rows(torch.zeros(2, 768)[:, ::2], z, b, 1)
    with pytest.raises(ValueError, match="z must be"):
        limits.check_rows(x, torch.zeros(2, 64), b, 1)


def test_a_plan_places_tiles_and_checkpoints() -> None:
    plan = prefill_plan([4, NULL_SLOT, 2, 7], [0, 20, 23, 23, 24], [13, 0, 5, 47], CPU, {(0, 32): 9, (3, 48): 1})
    assert plan.tiles.tolist() == [[0, -1], [0, 9], [0, -1], [3, 1]]
    assert plan.sequences.tolist() == [[4, 0, 13, 33, 0], [-1, 20, 0, 3, 3], [2, 23, 5, 5, 3], [7, 23, 47, 48, 3]]
    assert plan.has_checkpoints
    assert decode_facts([3, NULL_SLOT], [17, 0], CPU).tolist() == [[3, 17], [-1, 0]]


def test_bad_batches_are_refused() -> None:
    with pytest.raises(ValueError, match="share a slot"):
        prefill_plan([1, 1], [0, 1, 2], [0, 0], CPU)
    with pytest.raises(ValueError, match="no tile of the batch"):
        prefill_plan([1], [0, 20], [0], CPU, {(0, 32): 0})
    with pytest.raises(ValueError, match="1 sequences, 2 slots"):
        prefill_plan([1, 2], [0, 1], [0], CPU)
    with pytest.raises(ValueError, match="negative"):
        prefill_plan([-2], [0, 1], [0], CPU)
