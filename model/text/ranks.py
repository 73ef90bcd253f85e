"""`tiktoken.model`: the ranks of a byte-pair vocabulary, one line a token: base64 of its bytes, a space, its rank."""

import binascii
from pathlib import Path
from typing import Final

from forkpoint.model.config_fields import ModelConfigError

RANKS_FILE: Final = "tiktoken.model"
BYTE_VALUES: Final = 256


def read_ranks(folder: Path | str) -> list[bytes]:
    """Bytes of each token; its index is its rank, which is its id.

    Raises ModelConfigError: no such file, a line that is none, a token or rank that is there twice, a rank that is
    missing, a byte that is no token (some text could not be encoded).
    """
    path = Path(folder) / RANKS_FILE
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise ModelConfigError(RANKS_FILE, str(folder), error.strerror or str(error)) from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if line:
            token, rank = _parse(line, number, str(folder))
            if token in ranks:
                raise _error(folder, f"line {number} has the token of rank {ranks[token]} again")
            ranks[token] = rank
    tokens: list[bytes | None] = [None] * len(ranks)
    for token, rank in ranks.items():
        if rank < len(tokens) and tokens[rank] is not None:
            raise _error(folder, f"has rank {rank} twice")
        if rank < len(tokens):
            tokens[rank] = token
    whole = [token for token in tokens if token is not None]
    if len(whole) < len(tokens):
        raise _error(folder, f"lacks rank {tokens.index(None)}, and its largest is {max(ranks.values())}")
    if missing := [value for value in range(BYTE_VALUES) if bytes([value]) not in ranks]:
        raise _error(folder, f"has no token for the byte 0x{missing[0]:02x}")
    return whole


def _parse(line: bytes, number: int, folder: str) -> tuple[bytes, int]:
    encoded, space, rank = line.partition(b" ")
    try:
        token = binascii.a2b_base64(encoded, strict_mode=True)
    except binascii.Error as error:
        raise _error(folder, f"line {number} does not begin with base64: {error}") from error
    if not token or not space or not rank.isdigit():
        raise _error(folder, f"line {number} is not a token in base64, a space and a rank")
    return token, int(rank)


def _error(folder: Path | str, problem: str) -> ModelConfigError:
    return ModelConfigError(RANKS_FILE, str(folder), problem)
