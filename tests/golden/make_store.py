"""Write the golden files of the store's formats, version 1: `python -m tests.golden.make_store`.

Golden files of a released version are never rewritten: a new version gets new files and its own test.
"""

import math
import struct
from pathlib import Path

from forkpoint.parts import PartSpec
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.codec import digest_of, encode
from forkpoint.statestore.logrecord import write_records
from forkpoint.statestore.manifest import Manifest, ManifestPart, StateIdentity, seal
from forkpoint.statestore.records import Kind, StoreMarker

FOLDER = Path(__file__).parent / "store-v1"
MARKER = StoreMarker(1, "default", bytes(range(32)), bytes(range(32, 64)))
TOKENS = [(37 * index + 5) % 50_000 for index in range(40)]
RAW = struct.pack("<64f", *(math.sqrt(index) for index in range(64)))
ZEROS = bytes(4096)
SPECS = (PartSpec("kda.000.state.0", "float32", (8, 8)), PartSpec("mla.page.000000", "bfloat16", (2, 32, 32)))


def chain_after(tokens: list[int]) -> HashChain:
    """The chain over the first tokens."""
    chain = HashChain.root(MARKER)
    chain.extend(tokens)
    return chain


def manifest() -> Manifest:
    """The manifest of the golden checkpoint at 32."""
    identity = StateIdentity(MARKER.namespace, MARKER.model_digest, MARKER.tokenizer_digest, "layout-1")
    parts = tuple(ManifestPart(spec, digest_of(data)) for spec, data in zip(SPECS, (RAW, ZEROS), strict=True))
    return Manifest(identity, ("cpu-2-threads", "older"), 32, chain_after(TOKENS[:32]).grid_hash, parts)


def files() -> dict[str, bytes]:
    """Name -> content. The zstd frame is golden as input: another zstd may write other bytes."""
    prompt, answer = chain_after([]), chain_after(TOKENS[:35])
    (first,) = write_records(1, prompt, 1, Kind.PROMPT, TOKENS[:35])
    (second,) = write_records(1, answer, 2, Kind.GENERATED, TOKENS[35:], (-0.5, None, -1.25, None, -3.0))
    return {
        "raw.frame": encode(RAW),
        "zstd.frame": encode(ZEROS),
        "manifest.bin": seal(manifest()),
        "prompt.record": first[1],
        "generated.record": second[1],
        "head_hash.hex": chain_after(TOKENS).head_hash().hex().encode() + b"\n",
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, content in files().items():
        (FOLDER / name).write_bytes(content)
