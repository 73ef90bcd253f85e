"""Write the golden frames of version 2, which came with byte planes: `python -m tests.golden.make_frame_v2`.

As golden files of a released version they are never rewritten.
"""

import math
import struct
from pathlib import Path

from forkpoint.statestore.codec import encode

FOLDER = Path(__file__).parent / "frame-v2"
FLOATS = [math.sin(index) * 2.0 ** (index % 5 - 2) for index in range(256)]
FLOAT32 = struct.pack("<256f", *FLOATS)
BFLOAT16 = b"".join(struct.pack("<f", value)[2:] for value in FLOATS)


def files() -> dict[str, tuple[bytes, int]]:
    """Name -> raw bytes and their item size. The frames are golden as input: another zstd may write other bytes."""
    return {"float32.frame": (FLOAT32, 4), "bfloat16.frame": (BFLOAT16, 2)}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, (raw, item_bytes) in files().items():
        (FOLDER / name).write_bytes(encode(raw, item_bytes))
