"""Reading a session's log in pieces."""

from collections.abc import AsyncIterator
from itertools import chain
from typing import Final

from forkpoint.errors import LogCorruptError
from forkpoint.ids import SessionName
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.records import LogSlice

SLICE_TOKENS: Final = 8192
"""One read of the catalog: some tens of kilobytes."""


async def read_slices(catalog: Catalog, name: SessionName, start: int, end: int) -> AsyncIterator[LogSlice]:
    """The tokens of [start, end), ascending. Raises LogCorruptError when the log ends before `end`."""
    position = start
    while position < end:
        part = await catalog.read_log(name, position, min(SLICE_TOKENS, end - position))
        if not part.token_ids:
            raise LogCorruptError(str(name), position, position, f"the log ends here, its head is {end}")
        yield part
        position += len(part.token_ids)


async def read_all(catalog: Catalog, name: SessionName, start: int, end: int) -> LogSlice:
    """As read_slices, in one piece."""
    parts = [part async for part in read_slices(catalog, name, start, end)]
    return LogSlice(
        start,
        tuple(chain.from_iterable(part.token_ids for part in parts)),
        tuple(chain.from_iterable(part.kinds for part in parts)),
        tuple(chain.from_iterable(part.logprobs for part in parts)),
    )
