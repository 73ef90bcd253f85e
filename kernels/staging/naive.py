"""Staging in plain torch: the definition of what lies where, view by view."""

from collections.abc import Iterator

import torch
from torch import Tensor

from forkpoint.kernels.staging.pieces import Piece, Table


def gather(table: Table, buffer: Tensor, places: list[int]) -> None:
    """Copies all pieces at `places` (one index for each `which`: a slot, pages) into the buffer, uint8 [>= nbytes]."""
    for packed, pool in _pairs(table, buffer, places):
        packed.copy_(pool)


def scatter(table: Table, buffer: Tensor, places: list[int]) -> None:
    """Copies the buffer to the pieces at `places`."""
    for packed, pool in _pairs(table, buffer, places):
        pool.copy_(packed)


def _pairs(table: Table, buffer: Tensor, places: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece's place in the buffer, and in its pool. A part's pieces lie side by side along their last axis."""
    for pieces, offset in zip(table.parts, table.offsets, strict=True):
        views = [piece.view for piece in pieces]
        widths = [view.shape[-1] for view in views]
        size = sum(view.numel() * view.element_size() for view in views)
        whole = buffer[offset : offset + size].view(views[0].dtype).view(*views[0].shape[:-1], sum(widths))
        packed = torch.split_with_sizes(whole, widths, dim=-1)
        yield from zip(packed, (_at_place(piece, places) for piece in pieces), strict=True)


def _at_place(piece: Piece, places: list[int]) -> Tensor:
    """The piece's view at the place that it obeys."""
    view = piece.view
    items, rest = divmod(piece.step, view.element_size())
    if rest:
        raise ValueError(f"a step of {piece.step} bytes is no multiple of the item's {view.element_size()}")
    start = view.storage_offset() + items * places[piece.which]
    return view.as_strided(view.shape, view.stride(), start)


def split_planes(items: Tensor) -> Tensor:
    """The byte planes of items of any shape: uint8 [bytes of an item, items], plane p holds byte p of each item.

    Bytes are little-endian, so the last plane holds sign and exponent of a float: the one that compresses.
    """
    flat = items.contiguous().flatten()
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size()).t().contiguous()


def join_planes(planes: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse: items [n] of `dtype` from uint8 [bytes of an item, n]."""
    return planes.t().contiguous().flatten().view(dtype)
