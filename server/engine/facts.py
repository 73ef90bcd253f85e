"""The layout tag: a digest of everything that gives a checkpoint's bytes their meaning."""

import hashlib
import json
from typing import Final

from forkpoint.limits import PAGE_TOKENS, TILE_TOKENS
from forkpoint.model.state import StateLayout

TAG_BYTES: Final = 16
"""32 hexadecimal digits: a tag must differ between the layouts that a store ever meets."""


def layout_tag(layout: StateLayout) -> str:
    """Digest of names, dtypes, shapes and order of a checkpoint's parts, of the axes, and of tile and page size.

    The parts at one page hold every kind of part; pages after the first repeat it.
    """
    content = {
        "axes": {"state": "head value key", "conv": "tap channel(q k v)", "page": "layer row latent(c k)"},
        "parts": [[spec.name, spec.dtype, list(spec.shape)] for spec in layout.parts(PAGE_TOKENS)],
        "tile_tokens": TILE_TOKENS,
        "page_tokens": PAGE_TOKENS,
    }
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=TAG_BYTES).hexdigest()
