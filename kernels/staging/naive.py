"""Staging in plain torch: the definition of what lies where, view by view."""

import torch
from torch import Tensor

from forkpoint.kernels.staging.pieces import Piece


def at_place(piece: Piece, places: list[int]) -> Tensor:
    """The piece's view at the place that it obeys."""
    view = piece.view
    items, rest = divmod(piece.step, view.element_size())
    if rest:
        raise ValueError(f"a step of {piece.step} bytes is no multiple of the item's {view.element_size()}")
    start = view.storage_offset() + items * places[piece.which]
    return view.as_strided(view.shape, view.stride(), start)


def part_bytes(pieces: list[Piece], places: list[int]) -> Tensor:
    """A part's bytes, uint8 [n]: its pieces side by side along their last axis, row-major."""
    whole = torch.cat([at_place(piece, places) for piece in pieces], dim=-1)
    return whole.contiguous().flatten().view(torch.uint8)


def split_planes(items: Tensor) -> Tensor:
    """The byte planes of items of any shape: uint8 [bytes of an item, items], plane p holds byte p of each item.

    Bytes are little-endian, so the last plane holds sign and exponent of a float: the one that compresses.
    """
    flat = items.contiguous().flatten()
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size()).t().contiguous()


def join_planes(planes: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse: items [n] of `dtype` from uint8 [bytes of an item, n]."""
    return planes.t().contiguous().flatten().view(dtype)
