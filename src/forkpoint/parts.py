"""PartSpec: the shape of one piece of a session's state, as the store sees it.

The model's StateLayout yields these; the store checks bytes against them and knows nothing else about a model.
"""

import math
from dataclasses import dataclass
from typing import Final

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint8": 1}


@dataclass(frozen=True, slots=True)
class PartSpec:
    """One part of a checkpoint: a named, dense, row-major tensor.

    `name` is unique within a checkpoint (for example `kda.003.state.1`), `dtype` is a key of ITEM_BYTES, and bytes are
    little-endian.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"part {self.name!r}: unknown dtype {self.dtype!r}, expected one of {sorted(ITEM_BYTES)}")
        if any(extent < 0 for extent in self.shape):
            raise ValueError(f"part {self.name!r}: negative extent in shape {self.shape}")

    @property
    def nbytes(self) -> int:
        """Size of the raw bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]
