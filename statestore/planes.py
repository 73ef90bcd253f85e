"""Byte planes of floats: byte i of every item together.

The top plane (sign and exponent) compresses; the others are noise and stay as they are, so that only a quarter of
float32 and half of bfloat16 is worked on. Measured on states of a hybrid model: 0.85 and 0.69 of their bytes are left.
"""

from collections.abc import Sequence
from typing import Final

from forkpoint.statestore.blobs import Buffer

PLANE_ITEMS: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
"""dtype -> bytes an item, for the dtypes whose top byte is mostly exponent."""


def split(raw: Buffer, item_bytes: int) -> list[bytes]:
    """The planes of little-endian items, the lowest byte's first. `raw` is whole items."""
    whole = raw if isinstance(raw, bytes) else bytes(raw)  # strides of bytes are copied many times faster than a view's
    return [whole[plane::item_bytes] for plane in range(item_bytes)]


def join(planes: Sequence[Buffer]) -> bytearray:
    """The items whose planes these are; all planes have the same length."""
    items = bytearray(len(planes) * len(planes[0]))
    for index, plane in enumerate(planes):
        items[index :: len(planes)] = plane
    return items
