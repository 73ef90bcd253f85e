"""The functions that run inside the server: the files of lua/ as one library, named by its digest.

Library and functions carry the digest in their names, so that nodes of two versions use one server side by side.
"""

from functools import cache
from hashlib import blake2b
from importlib import resources
from typing import Final

from forkpoint.limits import REQUEST_ID_KEEP_SECONDS

FILES: Final = (
    "common",
    "workflows",
    "sessions",
    "open",
    "log",
    "forks",
    "migrations",
    "reads",
    "checkpoints",
    "store",
    "manifests",
    "collection",
)
"""In this order: a file uses what those before it define."""


@cache
def prefix() -> str:
    """What the name of every function begins with, before an underscore."""
    return f"forkpoint_{blake2b(_text().encode(), digest_size=6).hexdigest()}"


@cache
def source() -> str:
    """The library as FUNCTION LOAD takes it."""
    return f"#!lua name={prefix()}\n" + _text().replace("@PREFIX@", prefix())


def read_file(name: str) -> str:
    """The text of one of FILES."""
    folder = resources.files("forkpoint.statestore.redis") / "lua"
    return (folder / f"{name}.lua").read_text(encoding="utf-8")


@cache
def _text() -> str:
    text = "\n".join(read_file(name) for name in FILES)
    return text.replace("@KEEP_US@", str(REQUEST_ID_KEEP_SECONDS * 1_000_000))
