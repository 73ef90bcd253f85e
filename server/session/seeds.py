"""Sampling seeds: signed 64-bit."""

import secrets

from blake3 import blake3


def random_seed() -> int:
    """A fresh seed."""
    return int.from_bytes(secrets.token_bytes(8), "little", signed=True)


def derive_seed(parent_seed: int, child: str) -> int:
    """The seed of one of several children: BLAKE3 over the parent's seed (8 bytes, LE) and the child's id."""
    digest = blake3(parent_seed.to_bytes(8, "little", signed=True) + child.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def child_seed(policy: str, parent_seed: int, child: str, count: int) -> int:
    """`policy` "inherit", "derive" or "" (one child inherits, more derive)."""
    if policy == "inherit" or (policy == "" and count == 1):
        return parent_seed
    return derive_seed(parent_seed, child)
