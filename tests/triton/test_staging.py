"""Staging in Triton: the bytes of a checkpoint's parts in one buffer and back, byte for byte, and nothing else."""

from typing import Any, Final

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.staging import naive
from forkpoint.kernels.staging import triton as staging
from forkpoint.kernels.staging.pieces import Piece, build_table
from forkpoint.model.layout import StateDtypes, StateLayout
from forkpoint.model.state import TORCH_DTYPES, StateTensors
from tests.support.kernels import at_offset, same_bytes
from tests.support.random_model import random_config
from tests.support.staged import checkpoint_pieces, part_bytes, part_views, random_bytes
from tests.support.triton_shim import DEVICE

SLOTS, PAGES, POSITION = 3, 4, 80
SHAPES: Final = [
    staging.COPY,
    staging.CopyShape(block=1024, warps=2),
    staging.CopyShape(block=16384, warps=8, programs=5),
]
SHAPE = pytest.mark.parametrize("shape", SHAPES, ids=["default", "small", "five programs"])


def filled(config: dict[str, Any], dtypes: StateDtypes) -> StateTensors:
    """Pools of a small model, full of random bytes."""
    layout = StateLayout(random_config("bounded", **config), dtypes)
    tensors = StateTensors.allocate(layout, SLOTS, PAGES, DEVICE)
    for pool in (tensors.S, tensors.conv_grid, tensors.pages):
        random_bytes(pool)
    return tensors


MODELS: Final = [
    ({"heads": 4, "key_dim": 16}, StateDtypes("float32", "bfloat16")),
    ({"heads": 2, "key_dim": 32}, StateDtypes("bfloat16", "bfloat16")),
    ({"heads": 3, "key_dim": 5, "value_dim": 3, "kv_lora_rank": 11}, StateDtypes("float32", "bfloat16")),
    ({"heads": 3, "key_dim": 5, "value_dim": 3}, StateDtypes("bfloat16", "float32")),
]
"""Whole units, and shapes that leave units of 4 and 2 bytes."""


@SHAPE
@pytest.mark.parametrize("config,dtypes", MODELS, ids=["fp32", "bf16", "odd fp32", "odd bf16"])
def test_a_checkpoints_parts_lie_in_the_buffer_as_the_store_takes_them(
    config: dict[str, Any], dtypes: StateDtypes, shape: staging.CopyShape
) -> None:
    tensors = filled(config, dtypes)
    specs, slot, pages = tensors.layout.parts(POSITION), 2, [3, 1]
    table = build_table(checkpoint_pieces(tensors, specs))
    buffer = torch.full((table.nbytes + 64,), 0xA5, dtype=torch.uint8, device=DEVICE)
    staging.gather(table, buffer, [slot, *pages], shape)
    taken = torch.zeros(buffer.shape, dtype=torch.bool)
    for spec, offset in zip(specs, table.offsets, strict=True):
        assert offset % 16 == 0
        assert buffer[offset : offset + spec.nbytes].cpu().numpy().tobytes() == part_bytes(tensors, spec, slot, pages)
        taken[offset : offset + spec.nbytes] = True
    assert (buffer.cpu()[~taken] == 0xA5).all()


@SHAPE
@pytest.mark.parametrize("config,dtypes", MODELS, ids=["fp32", "bf16", "odd fp32", "odd bf16"])
def test_what_is_scattered_are_the_parts_and_neighbours_stay(
    config: dict[str, Any], dtypes: StateDtypes, shape: staging.CopyShape
) -> None:
    tensors, twin = filled(config, dtypes), filled(config, dtypes)
    for name in ("S", "conv_grid", "pages"):
        getattr(twin, name).copy_(getattr(tensors, name))
    specs, slot, pages = tensors.layout.parts(POSITION), 1, [0, 2]
    table = build_table(checkpoint_pieces(tensors, specs))
    buffer = torch.randint(0, 256, (table.nbytes,), dtype=torch.uint8).to(DEVICE)
    staging.scatter(table, buffer, [slot, *pages], shape)
    for spec, offset in zip(specs, table.offsets, strict=True):
        views = part_views(twin, spec, slot, pages)
        part = buffer[offset : offset + spec.nbytes].view(TORCH_DTYPES[spec.dtype]).view(spec.shape)
        for view, columns in zip(
            views, torch.split_with_sizes(part, [view.shape[-1] for view in views], dim=-1), strict=True
        ):
            view.copy_(columns)
    for name in ("S", "conv_grid", "pages"):
        assert same_bytes(getattr(tensors, name), getattr(twin, name))


@pytest.mark.parametrize("config,dtypes", MODELS, ids=["fp32", "bf16", "odd fp32", "odd bf16"])
def test_the_twin_copies_the_same_bytes(config: dict[str, Any], dtypes: StateDtypes) -> None:
    tensors, twin = filled(config, dtypes), filled(config, dtypes)
    for name in ("S", "conv_grid", "pages"):
        getattr(twin, name).copy_(getattr(tensors, name))
    specs, places = tensors.layout.parts(POSITION), [1, 0, 2]
    table, twins = (build_table(checkpoint_pieces(pools, specs)) for pools in (tensors, twin))
    ours, theirs = (torch.zeros(table.nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    staging.gather(table, ours, places)
    naive.gather(table, theirs, places)
    assert torch.equal(ours, theirs)
    buffer = torch.randint(0, 256, (table.nbytes,), dtype=torch.uint8).to(DEVICE)
    staging.scatter(table, buffer, places)
    naive.scatter(twins, buffer, places)
    for name in ("S", "conv_grid", "pages"):
        assert same_bytes(getattr(tensors, name), getattr(twin, name))


def slot_pools() -> list[tuple[Tensor, int]]:
    """Pools of all dtypes of a slot, [layers, slots, ...] or [slots, ...], each with the axis of its slots."""
    shapes = [
        ((2, SLOTS, 2, 16, 16), torch.float32, 1),
        ((2, SLOTS, 16, 2, 16), torch.bfloat16, 1),
        ((2, SLOTS, 2, 16), torch.int32, 1),
        ((2, SLOTS, 3, 96), torch.bfloat16, 1),
        ((SLOTS, 2, 40), torch.bfloat16, 0),
    ]
    pools = [(torch.empty(shape, dtype=dtype, device=DEVICE), axis) for shape, dtype, axis in shapes]
    for pool, _ in pools:
        random_bytes(pool)
    return pools


@SHAPE
def test_a_slot_moves_whole_and_alone(shape: staging.CopyShape) -> None:
    pools = slot_pools()
    before = [pool.clone() for pool, _ in pools]
    pieces = [
        [Piece(view, pool.stride(axis) * pool.element_size())]
        for pool, axis in pools
        for view in ([pool[0]] if axis == 0 else [layer[0] for layer in pool])
    ]
    staging.move(build_table(pieces), [2], [0], shape)
    for (pool, axis), old in zip(pools, before, strict=True):
        old.select(axis, 0).copy_(old.select(axis, 2))
        assert same_bytes(pool, old)


def test_pages_move_together_and_alone() -> None:
    pages = torch.empty((6, 2, 64, 40), dtype=torch.bfloat16, device=DEVICE)
    random_bytes(pages)
    expected = pages.clone()
    expected[1], expected[0] = expected[5], expected[3]
    step = pages.stride(0) * pages.element_size()
    staging.move(build_table([[Piece(pages[0], step, which)] for which in range(2)]), [5, 3], [1, 0])
    assert same_bytes(pages, expected)


def test_places_may_lie_on_the_device() -> None:
    pool = torch.empty((4, 32), device=DEVICE)
    random_bytes(pool)
    table = build_table([[Piece(pool[0], 128)]])
    buffer = torch.zeros(128, dtype=torch.uint8, device=DEVICE)
    staging.gather(table, buffer, torch.tensor([3], device=DEVICE))
    assert same_bytes(buffer, pool[3].view(torch.uint8))


def test_a_table_of_empty_pieces_copies_nothing() -> None:
    pool = torch.empty((4, 0, 8), device=DEVICE)
    table = build_table([[Piece(pool[0], 0)]])
    assert table.nbytes == 0 and table.offsets == (0,)
    staging.gather(table, torch.empty(0, dtype=torch.uint8, device=DEVICE), [0])


def test_a_buffer_that_does_not_fit_and_pieces_that_do_not_agree_are_refused() -> None:
    pool = torch.zeros((4, 32), device=DEVICE)
    table = build_table([[Piece(pool[0], 128)]])
    with pytest.raises(ValueError, match="at least 128 bytes, not 127"):
        staging.gather(table, torch.empty(127, dtype=torch.uint8, device=DEVICE), [0])
    with pytest.raises(ValueError, match="no multiple of 16"):
        staging.gather(table, torch.empty(129, dtype=torch.uint8, device=DEVICE)[1:], [0])
    with pytest.raises(ValueError, match="1, 2"):
        build_table([[Piece(pool[:1], 128), Piece(pool[:2], 128)]])
    with pytest.raises(ValueError, match="at least one"):
        build_table([])


PLANES: Final = [staging.PLANES, staging.PlanesShape(block=256, warps=1)]


@pytest.mark.parametrize("shape", PLANES, ids=["default", "small"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("count", [4, 1, 37, 255, 256, 4100])
def test_planes_are_the_twins_and_joining_them_gives_the_items_back(
    count: int, dtype: torch.dtype, shape: staging.PlanesShape
) -> None:
    pool = torch.empty((3, 2, count), dtype=dtype, device=DEVICE)
    random_bytes(pool)
    items = pool[:, 1]
    planes = staging.split_planes(items, shape=shape)
    assert same_bytes(planes, naive.split_planes(items))
    expected, joined = torch.empty_like(pool), torch.empty_like(pool)
    random_bytes(joined)
    expected.copy_(joined)
    expected[:, 1] = items
    staging.join_planes(planes, joined[:, 1], shape)
    assert same_bytes(joined, expected)
    assert same_bytes(naive.join_planes(planes, dtype), items.contiguous().flatten())


def test_planes_at_odd_addresses_are_the_same() -> None:
    items = torch.empty((1, 40), dtype=torch.bfloat16, device=DEVICE)
    random_bytes(items)
    moved, planes = at_offset(items, 1), torch.empty(81, dtype=torch.uint8, device=DEVICE)[1:].view(2, 40)
    assert same_bytes(staging.split_planes(moved, planes), naive.split_planes(items))


def test_planes_say_what_they_need() -> None:
    items = torch.zeros((2, 8), device=DEVICE)
    with pytest.raises(ValueError, match=r"planes must be uint8 \[4, 16\]"):
        staging.split_planes(items, torch.empty((4, 15), dtype=torch.uint8, device=DEVICE))
    with pytest.raises(ValueError, match="contiguous rows"):
        staging.split_planes(items.t())
    assert staging.split_planes(items[:0]).shape == (4, 0)


def test_the_last_plane_holds_sign_and_exponent() -> None:
    """What a codec compresses, and the order in which it finds it."""
    items = torch.tensor([[1.0, -2.0]], device=DEVICE)
    assert staging.split_planes(items)[3].tolist() == [0x3F, 0xC0]
    assert staging.split_planes(items.bfloat16())[1].tolist() == [0x3F, 0xC0]
