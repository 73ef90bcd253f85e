"""Steps replayed as CUDA graphs give the bits of steps launched kernel by kernel."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tests.support.gpu import require_gpu
from tests.support.model_runs import ModelRun, random_ids
from tests.support.random_model import Kind, fitted, random_model

require_gpu()

KINDS: list[Kind] = ["kimi-linear", "k3"]
LENGTHS = (1010, 250, 15, 3)
"""One passes into a second split of attention's keys, one into another page, all of them the ends of tiles."""
STEPS = 36


def consumed(run: ModelRun, prompts: list[list[int]], more: list[list[int]]) -> list[Tensor]:
    """Logits of every step: the first prompt in chunks, from the third on while another sequence decodes, then the
    others; all decode, then without the second one, then only the first."""
    chunks = [prompts[0][at : at + 128] for at in range(0, len(prompts[0]), 128)]
    steps = [run.consume([(0, chunk)]) for chunk in chunks[:2]]
    run.consume([(3, prompts[3])])
    steps += [run.consume([(0, chunk), (3, [token])]) for chunk, token in zip(chunks[2:], more[3], strict=False)]
    steps.append(run.consume([(1, prompts[1]), (2, prompts[2])]))
    more = [*more[:3], more[3][len(chunks) - 2 :]]
    for step in range(STEPS):
        here = [0, 1, 2, 3] if step < 16 else [3, 0, 2] if step < 28 else [0]
        steps.append(run.consume([(slot, more[slot][step : step + 1]) for slot in here]))
    return steps


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_steps_have_the_bits_of_steps_launched_kernel_by_kernel(kind: Kind, device: torch.device) -> None:
    config, weights = random_model(kind, layers=5, mla_layers=[3, 5], **fitted(device))
    prompts = [random_ids(config, length, seed=length) for length in LENGTHS]
    more = [random_ids(config, STEPS + 8, seed=100 + slot) for slot in range(len(LENGTHS))]
    runs = [ModelRun(config, weights, device, tokens=1088) for _ in range(2)]
    runs[0].decoder.replay = False
    expected, replayed = (consumed(run, prompts, more) for run in runs)
    for step, (ours, theirs) in enumerate(zip(replayed, expected, strict=True)):
        assert torch.equal(ours, theirs), f"step {step}"
    for slot in range(len(LENGTHS)):
        assert runs[0].parts(slot) == runs[1].parts(slot)
    assert torch.equal(runs[0].tensors.norm_rows, runs[1].tensors.norm_rows)
    graphs = cast(Any, runs[1].decoder.kernels)._graphs
    assert graphs.can_record and len(graphs._graphs) >= 5, "steps were replayed"
    assert cast(Any, runs[0].decoder.kernels)._graphs is None
