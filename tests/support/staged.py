"""A checkpoint's parts as pieces for staging, from the layout of a model's state."""

import torch
from torch import Tensor

from forkpoint.kernels.staging.pieces import Piece
from forkpoint.model.state import StateTensors
from forkpoint.parts import PartSpec


def checkpoint_pieces(tensors: StateTensors, specs: tuple[PartSpec, ...]) -> list[list[Piece]]:
    """Pieces of each part; place 0 is the slot, place 1 + n the session's page n."""
    layout, pieces = tensors.layout, []
    for spec in specs:
        place = layout.kda_part_places.get(spec.name)
        if place is None:
            pool, number = tensors.pages, int(spec.name.rpartition(".")[2])
            pieces.append([Piece(pool[0, :, : spec.shape[1]], pool.stride(0) * pool.element_size(), 1 + number)])
        elif place.kind == "state":
            pool = tensors.S
            view = pool[place.ordinal, 0, place.first_head : place.last_head]
            pieces.append([Piece(view, pool.stride(1) * pool.element_size())])
        else:
            pool, step = tensors.conv_grid, tensors.conv_grid.stride(1) * tensors.conv_grid.element_size()
            ranges = layout.conv_channel_ranges(place.first_head, place.last_head)
            pieces.append([Piece(pool[place.ordinal, 0, :, first:last], step) for first, last in ranges])
    return pieces


def part_views(tensors: StateTensors, spec: PartSpec, slot: int, page_table: list[int]) -> list[Tensor]:
    """Where a part lies, by plain slicing: views side by side along their last axis."""
    place = tensors.layout.kda_part_places.get(spec.name)
    if place is None:
        return [tensors.pages[page_table[int(spec.name.rpartition(".")[2])], :, : spec.shape[1]]]
    if place.kind == "state":
        return [tensors.S[place.ordinal, slot, place.first_head : place.last_head]]
    channels = tensors.layout.conv_channel_ranges(place.first_head, place.last_head)
    return [tensors.conv_grid[place.ordinal, slot, :, first:last] for first, last in channels]


def part_bytes(tensors: StateTensors, spec: PartSpec, slot: int, page_table: list[int]) -> bytes:
    """A part's bytes as a store takes them: row-major, little-endian."""
    whole = torch.cat(part_views(tensors, spec, slot, page_table), dim=-1)
    assert whole.shape == spec.shape
    return whole.contiguous().cpu().view(torch.uint8).numpy().tobytes()


def random_bytes(pool: Tensor) -> None:
    """Fill a pool with random bytes: NaNs of every payload among them."""
    data = torch.randint(0, 256, (pool.numel() * pool.element_size(),), dtype=torch.uint8)
    pool.copy_(data.view(pool.dtype).view(pool.shape))
