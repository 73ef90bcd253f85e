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


def random_bytes(pool: Tensor) -> None:
    """Fill a pool with random bytes: NaNs of every payload among them."""
    data = torch.randint(0, 256, (pool.numel() * pool.element_size(),), dtype=torch.uint8)
    pool.copy_(data.view(pool.dtype).view(pool.shape))
