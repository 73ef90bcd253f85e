"""StateLayout and StateTensors: a checkpoint's parts are all that a continuation needs, and sizes add up."""

import math

import pytest
import torch

from forkpoint.limits import PAGE_TOKENS
from forkpoint.model.layout import StateDtypes, StateLayout
from forkpoint.model.state import POISON_INT32, StateTensors
from forkpoint.parts import ITEM_BYTES, PartSpec
from tests.support.model_runs import ModelRun, random_ids
from tests.support.random_model import Kind, fitted, random_config, random_model


@pytest.fixture
def layout() -> StateLayout:
    return StateLayout(random_config("bounded", heads=4, value_dim=24))


@pytest.mark.parametrize("position", [0, 16, 48, 64, 80, 640])
def test_part_sizes_add_up_to_the_checkpoint_size(layout: StateLayout, position: int) -> None:
    parts = layout.parts(position)
    assert sum(part.nbytes for part in parts) == layout.checkpoint_bytes(position)
    assert len({part.name for part in parts}) == len(parts)
    pages = [part for part in parts if part.name.startswith("mla.page.")]
    assert sum(part.shape[1] for part in pages) == position
    assert all(part.shape[1] == PAGE_TOKENS for part in pages[:-1])


def test_parts_are_named_by_layer_and_head_group_in_layer_order(layout: StateLayout) -> None:
    parts = layout.parts(80)
    assert layout.head_groups == 4
    assert [part.name for part in parts[:3]] == ["kda.000.state.0", "kda.000.conv.0", "kda.000.state.1"]
    assert parts[0] == PartSpec("kda.000.state.0", "float32", (1, 24, 16))
    assert parts[1] == PartSpec("kda.000.conv.0", "float32", (3, 16 + 16 + 24))
    assert parts[-1] == PartSpec("mla.page.000001", "float32", (1, 16, 40))
    layers = [int(part.name.split(".")[1]) for part in parts if part.name.startswith("kda.")]
    assert layers == sorted(layers)
    assert set(layers) == {0, 1, 2}


@pytest.mark.parametrize("position", [-16, 1, 15, 17])
def test_a_checkpoint_off_the_grid_is_refused(layout: StateLayout, position: int) -> None:
    with pytest.raises(ValueError, match="grid"):
        layout.parts(position)
    with pytest.raises(ValueError, match="grid"):
        layout.checkpoint_bytes(position)


def test_slot_and_page_bytes_are_the_bytes_of_the_tensors(layout: StateLayout) -> None:
    tensors = StateTensors.allocate(layout, slots=3, pages=5)
    held = sum(getattr(tensors, name).nbytes for name in layout.slot_tensors)
    assert held == 3 * layout.slot_bytes()
    assert tensors.pages.nbytes == 5 * layout.page_bytes()
    assert layout.page_bytes() == PAGE_TOKENS * layout.latent_bytes_per_token()


def test_a_narrower_state_dtype_halves_only_what_it_names(layout: StateLayout) -> None:
    narrow = StateLayout(layout.config, StateDtypes(kda="bfloat16"))
    saved = layout.slot_bytes() - narrow.slot_bytes()
    assert saved == layout.slot_tensors["S"].nbytes // 2
    with pytest.raises(ValueError, match="unknown dtype"):
        StateDtypes(kda="fp8")


def test_memory_is_poisoned_at_allocation_and_reset_gives_the_empty_state(layout: StateLayout) -> None:
    tensors = StateTensors.allocate(layout, slots=2, pages=2)
    assert tensors.S.isnan().all()
    assert tensors.pages.isnan().all()
    assert (tensors.kda_layers[0].opened["g"] == POISON_INT32).all()
    tensors.reset_slot(1)
    for name in ("S", "conv_ring", "conv_grid"):
        assert (getattr(tensors, name)[:, 1] == 0).all()
        assert getattr(tensors, name)[:, 0].isnan().all()
    assert tensors.kda_layers[0].opened["k"][1].isnan().all()
    assert tensors.norm_rows.isnan().all()


def fill(tensors: StateTensors) -> None:
    """Distinct finite values everywhere."""
    generator = torch.Generator().manual_seed(0)
    for name in (*tensors.layout.slot_tensors, "pages"):
        tensor = getattr(tensors, name)
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        else:
            tensor.copy_(torch.randint(-(2**20), 0, tensor.shape, generator=generator))


def test_copied_slots_and_pages_are_equal_in_everything(layout: StateLayout) -> None:
    tensors = StateTensors.allocate(layout, slots=3, pages=2)
    fill(tensors)
    tensors.copy_slot(0, 2)
    tensors.copy_page(1, 0)
    for name in layout.slot_tensors:
        tensor = getattr(tensors, name)
        source, target = (tensor[0], tensor[2]) if name == "norm_rows" else (tensor[:, 0], tensor[:, 2])
        assert torch.equal(source, target)
    assert torch.equal(tensors.pages[0], tensors.pages[1])


@pytest.mark.parametrize("kind", ["bounded", "softplus"])
@pytest.mark.parametrize("consumed", [16, 37, 64, 79, 80])
def test_a_poisoned_slot_restored_from_its_parts_continues_equally(
    kind: Kind, consumed: int, device: torch.device
) -> None:
    config, weights = random_model(kind, **fitted(device, value_dim=24))
    ids = random_ids(config, 120)
    run = ModelRun(config, weights, device, tokens=128)
    expected = run.consume([(0, ids)])
    run.consume([(1, ids[:consumed])])
    position = consumed // 16 * 16
    saved = run.parts(1)
    assert set(saved) == {spec.name for spec in run.layout.parts(position)}
    run.restore(1, position, saved)
    assert torch.equal(run.consume([(1, ids[position:])]), expected[position:])
    assert run.parts(1) == run.parts(0)


def test_a_checkpoint_of_the_empty_state_restores_to_a_fresh_slot(device: torch.device) -> None:
    config, weights = random_model(**fitted(device))
    ids = random_ids(config, 30)
    run = ModelRun(config, weights, device)
    expected = run.consume([(0, ids)])
    run.restore(1, 0, run.parts(1))
    assert torch.equal(run.consume([(1, ids)]), expected)


def test_every_part_matters_to_the_continuation(device: torch.device) -> None:
    config, weights = random_model(layers=4, **fitted(device))
    ids = random_ids(config, 100)
    run = ModelRun(config, weights, device, tokens=128)
    expected = run.consume([(0, ids)])
    run.consume([(1, ids[:80])])
    saved = run.parts(1)
    for spec in run.layout.parts(80):
        damaged = bytearray(saved[spec.name])
        damaged[ITEM_BYTES[spec.dtype] - 1] ^= 0x80  # the first value's sign
        run.restore(1, 80, saved | {spec.name: bytes(damaged)})
        assert not torch.equal(run.consume([(1, ids[80:])]), expected[80:]), spec.name


def test_finish_restore_leaves_no_norm_row_of_an_earlier_session(device: torch.device) -> None:
    config, weights = random_model(**fitted(device))
    run = ModelRun(config, weights, device)
    run.tensors.poison = False
    run.consume([(0, random_ids(config, 32))])
    run.tensors.finish_restore(0, 32)
    assert math.isnan(run.tensors.norm_rows[0, 0, 0].item())
    assert run.tensors.norm_rows[0].isnan().all()
