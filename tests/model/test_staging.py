"""Checkpoint parts out of slots and pages, and back: every byte once, and nothing beside them."""

import pytest
import torch

from forkpoint.model.kernels import choose_kernels
from forkpoint.model.layout import StateDtypes, StateLayout
from forkpoint.model.staging import PAGES_AT_ONCE, StateStaging
from forkpoint.model.state import StateTensors
from forkpoint.parts import PartSpec
from tests.support.random_model import random_config
from tests.support.staged import part_bytes, random_bytes

POOLS = ("S", "conv_grid", "pages")


def staged(dtypes: StateDtypes, device: torch.device, pages: int = 6) -> tuple[StateTensors, StateStaging]:
    """Pools of two slots of a small model, full of random bytes, and their staging."""
    config = random_config("bounded", value_dim=24)
    tensors = StateTensors.allocate(StateLayout(config, dtypes), 2, pages, device)
    for name in POOLS:
        random_bytes(getattr(tensors, name))
    return tensors, StateStaging(tensors, choose_kernels(config, device))


@pytest.fixture
def tensors_and_staging(device: torch.device) -> tuple[StateTensors, StateStaging]:
    return staged(StateDtypes(), device)


@pytest.mark.parametrize("position", [0, 16, 64, 144])
@pytest.mark.parametrize("dtypes", [StateDtypes(), StateDtypes("bfloat16", "bfloat16")])
def test_parts_that_are_read_are_the_bytes_where_they_lie(
    dtypes: StateDtypes, position: int, device: torch.device
) -> None:
    tensors, staging = staged(dtypes, device)
    pages = [4, 0, 2]
    specs = []
    for spec, data in staging.read(position, 1, pages):
        assert data.numpy().tobytes() == part_bytes(tensors, spec, 1, pages)
        specs.append(spec)
    assert tuple(specs) == tensors.layout.parts(position)


@pytest.mark.parametrize("dtypes", [StateDtypes(), StateDtypes("bfloat16", "bfloat16")])
def test_parts_that_are_written_are_read_again_and_nothing_else_changes(
    dtypes: StateDtypes, device: torch.device
) -> None:
    tensors, staging = staged(dtypes, device)
    source, target = [4, 0, 2], [5, 1, 3]
    expected = {name: getattr(tensors, name).clone() for name in POOLS}
    for name in ("S", "conv_grid"):
        expected[name][:, 1] = expected[name][:, 0]
    expected["pages"][[5, 1]] = expected["pages"][[4, 0]]
    expected["pages"][3, :, :16] = expected["pages"][2, :, :16]
    data = {spec: part.numpy().tobytes() for spec, part in staging.read(144, 0, source)}
    buffer = staging.host_buffer()
    for spec in reversed(data):
        staging.write(spec, memoryview(data[spec]), buffer, target)
    staging.finish(buffer, 1)
    for name in POOLS:
        assert torch.equal(getattr(tensors, name).view(torch.uint8), expected[name].view(torch.uint8))
    assert {spec: part.numpy().tobytes() for spec, part in staging.read(144, 1, target)} == data


def test_more_pages_than_are_on_their_way_at_once_come_in_order(device: torch.device) -> None:
    count = 2 * PAGES_AT_ONCE + 3
    tensors, staging = staged(StateDtypes(), device, count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(3)).tolist()
    for spec, data in staging.read(count * 64 - 16, 0, order):
        if spec.name.startswith("mla"):
            assert data.numpy().tobytes() == part_bytes(tensors, spec, 0, order)


def test_the_parts_of_all_head_groups_cover_every_value_once(device: torch.device) -> None:
    tensors, staging = staged(StateDtypes(), device)
    held = torch.cat([data.clone().view(torch.int32) for _, data in staging.read(0, 0, [])])
    expected = torch.cat([pool[:, 0].flatten() for pool in (tensors.S, tensors.conv_grid)]).view(torch.int32).cpu()
    assert torch.equal(held.sort().values, expected.sort().values)


def test_a_part_of_wrong_size_or_name_is_refused(tensors_and_staging: tuple[StateTensors, StateStaging]) -> None:
    tensors, staging = tensors_and_staging
    state = tensors.layout.parts(16)[0]
    buffer = staging.host_buffer()
    with pytest.raises(ValueError, match="bytes"):
        staging.write(state, bytes(state.nbytes - 4), buffer, [0])
    for name in ("kda.003.state.0", "mla.page.x", "other"):
        with pytest.raises(ValueError, match="no part"):
            staging.write(PartSpec(name, "float32", (1,)), bytes(4), buffer, [0])
    with pytest.raises(ValueError, match="beyond"):
        staging.write(PartSpec("mla.page.000001", "float32", (1, 16, 40)), bytes(2560), buffer, [0])
    with pytest.raises(ValueError, match="beyond"):
        list(staging.read(80, 0, [0]))
    with pytest.raises(ValueError, match="grid"):
        list(staging.read(17, 0, [0]))


def test_a_model_without_kda_layers_has_pages_only(device: torch.device) -> None:
    config = random_config("bounded", layers=2, mla_layers=[1, 2])
    tensors = StateTensors.allocate(StateLayout(config), 1, 1, device)
    random_bytes(tensors.pages)
    staging = StateStaging(tensors, choose_kernels(config, device))
    ((spec, data),) = staging.read(32, 0, [0])
    assert data.numpy().tobytes() == part_bytes(tensors, spec, 0, [0])
    buffer = staging.host_buffer()
    staging.write(spec, bytes(spec.nbytes), buffer, [0])
    staging.finish(buffer, 0)
    assert not tensors.pages[0, :, :32].any()
