"""The head hash, against a second reading of its definition."""

import random
import struct

import pytest
from blake3 import blake3

from forkpoint.statestore.chain import HashChain, grid_hashes, pack_tokens, root_hash, unpack_tokens
from forkpoint.statestore.records import StoreMarker
from tests.support.store import MARKER


def defined(marker: StoreMarker, tokens: list[int]) -> bytes:
    """head_hash written out from the definition."""
    text = marker.namespace.encode()
    link = blake3(struct.pack("<I", len(text)) + text + marker.model_digest + marker.tokenizer_digest).digest()
    whole = len(tokens) // 16 * 16
    for start in range(0, whole, 16):
        link = blake3(link + struct.pack("<16I", *tokens[start : start + 16])).digest()
    tail = tokens[whole:]
    return blake3(link + struct.pack(f"<{len(tail)}I", *tail)).digest() if tail else link


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 31, 32, 33, 200])
def test_the_chain_is_what_its_definition_says_however_it_is_extended(count: int) -> None:
    rng = random.Random(count)
    tokens = [rng.randrange(2**32) for _ in range(count)]
    for _ in range(5):
        chain, position = HashChain.root(MARKER), 0
        while position < count:
            step = rng.randint(0, 40)
            chain.extend(tokens[position : position + step])
            position = min(count, position + step)
            assert chain.head_hash() == defined(MARKER, tokens[:position])
            assert (chain.position, chain.grid_position) == (position, position // 16 * 16)


def test_the_root_depends_on_namespace_and_digests() -> None:
    roots = {
        root_hash(StoreMarker(1, *fields))
        for fields in (
            ("default", bytes(32), bytes(32)),
            ("tenant", bytes(32), bytes(32)),
            ("ténant", bytes(32), bytes(32)),
            ("default", b"\1" * 32, bytes(32)),
            ("default", bytes(32), b"\1" * 32),
        )
    }
    assert len(roots) == 5
    with pytest.raises(ValueError, match="32 bytes"):
        root_hash(StoreMarker(1, "default", b"short", bytes(32)))


def test_grid_hashes_are_the_head_hashes_of_grid_points() -> None:
    tokens = list(range(70))
    points = grid_hashes(root_hash(MARKER), tokens)
    assert points == [(position, defined(MARKER, tokens[:position])) for position in (0, 16, 32, 48, 64)]
    assert grid_hashes(points[2][1], tokens[32:], 32) == points[2:]
    assert grid_hashes(root_hash(MARKER), []) == [(0, root_hash(MARKER))]


def test_any_32_bit_token_id_packs_and_nothing_else() -> None:
    ids = [0, 1, 2**31, 2**32 - 1]
    assert unpack_tokens(pack_tokens(ids)) == ids
    for wrong in (-1, 2**32):
        with pytest.raises(OverflowError):
            pack_tokens([wrong])
