"""The whole decoder on the Triton kernels: what tests/exactness asks of an engine, small enough for the interpreter."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from forkpoint.model.geometries import geometry
from forkpoint.model.layout import StateLayout
from forkpoint.model.plan import make_plan
from tests.support import triton_shim
from tests.support.model_runs import ModelRun, random_ids
from tests.support.random_model import Kind, random_config, random_weights

if TYPE_CHECKING:
    from forkpoint.model.step_graphs import Recorder

pytestmark = pytest.mark.skipif(not triton_shim.AVAILABLE, reason=triton_shim.REASON)
DEVICE = triton_shim.DEVICE
KINDS: list[Kind] = ["bounded", "softplus"]
TOKENS = 21


def small_config(kind: Kind) -> ModelConfig:
    """One KDA layer, one MLA layer, head sizes that the kernels take."""
    sizes = {"heads": 1, "key_dim": 128, "vocab_size": 64, "intermediate_size": 64, "kv_lora_rank": 16}
    return random_config(kind, layers=2, mla_layers=[2], qk_rope_head_dim=16, **sizes)


def triton_run(
    config: ModelConfig, weights: dict[str, Tensor], slots: int = 4, recorder: "Recorder | None" = None
) -> ModelRun:
    from forkpoint.model.triton_kernels import TritonKernels

    return ModelRun(config, weights, DEVICE, slots, tokens=64, kernels=TritonKernels(config, DEVICE, recorder))


class Again:
    """Records by keeping the work, and replays by doing it."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            return work()

        return replay


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> tuple[ModelConfig, dict[str, Tensor]]:
    config = small_config(request.param)
    return config, random_weights(config, seed=11)


def test_a_plan_counts_the_slots_that_the_kernels_take() -> None:
    from forkpoint.model.triton_kernels import TritonKernels

    config = geometry("k3")
    assert make_plan(config, 0).slot.total == StateLayout(config, TritonKernels.dtypes).slot_bytes()


def test_prefill_cuts_and_decoded_tokens_give_equal_logits_and_parts(
    model: tuple[ModelConfig, dict[str, Tensor]],
) -> None:
    config, weights = model
    ids = random_ids(config, TOKENS)
    run = triton_run(config, weights)
    whole = run.consume([(0, ids)])
    cut = run.cut(1, ids, [15, 2])
    single = run.cut(2, ids, [13] + [1] * (TOKENS - 14))
    assert whole.isfinite().all()
    assert torch.equal(whole, cut)
    assert torch.equal(whole, single)
    assert run.parts(0) == run.parts(1) == run.parts(2)
    assert torch.equal(run.tensors.norm_rows[0], run.tensors.norm_rows[2])


def test_decode_steps_of_shapes_that_come_again_give_the_same_bits(
    model: tuple[ModelConfig, dict[str, Tensor]],
) -> None:
    """Two sequences at different positions of their tiles, over fixed and padded tables; a step that is not only of
    single rows is done as it is."""
    config, weights = model
    a, b = random_ids(config, 20), random_ids(config, 11, seed=4)
    plain, recorder = triton_run(config, weights), Again()
    alone = [plain.consume([(0, a)])[14:], plain.consume([(1, b)])[5:]]
    run = triton_run(config, weights, recorder=recorder)
    run.consume([(0, a[:14]), (1, b[:5])])
    steps = [run.consume([(0, [one]), (1, [other])]) for one, other in zip(a[14:], b[5:], strict=True)]
    assert (recorder.recorded, recorder.replayed) == (1, 4)
    assert torch.equal(torch.stack(steps, dim=1), torch.stack(alone))
    assert [run.parts(slot) for slot in (0, 1)] == [plain.parts(slot) for slot in (0, 1)]
    assert torch.equal(run.tensors.norm_rows[:2], plain.tensors.norm_rows[:2])
    for slot in (2, 3):
        run.consume([(slot, [1, 2])])
    assert recorder.recorded == 1, "shapes of appends are not expected again"
    run.decoder.replay = False
    for _ in range(2):
        run.consume([(2, [1]), (3, [2])])
    assert (recorder.recorded, recorder.replayed) == (1, 4)


def test_neighbours_and_their_order_change_nothing(model: tuple[ModelConfig, dict[str, Tensor]]) -> None:
    """A mixed batch takes both KDA kernels, its decoded rows moved to the front and back."""
    config, weights = model
    a, b, c = (random_ids(config, count, seed=count) for count in (20, 18, 5))
    run = triton_run(config, weights)
    alone = run.consume([(0, a)])
    run.consume([(2, c[:4]), (1, a[:15]), (3, b[:9])])
    packed = run.consume([(1, a[15:]), (2, c[4:]), (3, b[9:10])])
    assert torch.equal(packed[:5], alone[15:])
    assert run.parts(0) == run.parts(1)
    single = triton_run(config, weights, slots=2)
    assert torch.equal(packed[5:6], single.consume([(0, c)])[4:])
    assert torch.equal(packed[6:], single.consume([(1, b[:10])])[9:])


def test_a_restored_sequence_goes_on_as_the_one_it_was_taken_from(
    model: tuple[ModelConfig, dict[str, Tensor]],
) -> None:
    config, weights = model
    ids = random_ids(config, TOKENS)
    run = triton_run(config, weights)
    whole = run.consume([(0, ids)])
    run.consume([(1, ids[:17])])
    run.restore(2, 16, run.parts(1))
    assert torch.equal(run.consume([(2, ids[16:])]), whole[16:])


def test_the_decoder_is_close_to_its_plain_torch_twin(model: tuple[ModelConfig, dict[str, Tensor]]) -> None:
    """The twin computes in fp32; two layers of bf16 rows stay within a few roundings of it."""
    config, weights = model
    ids = random_ids(config, TOKENS)
    ours = triton_run(config, weights).consume([(0, ids)]).cpu()
    twin = ModelRun(config, weights, "cpu", slots=1).consume([(0, ids)])
    assert (ours - twin).abs().max() <= 0.03 * twin.abs().max()


def test_entries_without_rows_leave_their_slots_alone(model: tuple[ModelConfig, dict[str, Tensor]]) -> None:
    config, weights = model
    run = triton_run(config, weights)
    run.consume([(0, random_ids(config, 17))])
    before = run.parts(0)
    logits = run.consume([(0, []), (1, [3, 4])])
    assert logits.shape == (2, config.vocab_size)
    assert run.parts(0) == before
    assert run.consume([]).shape == (0, config.vocab_size)
