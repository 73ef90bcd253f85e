"""Verified reads of a log across its ancestors."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forkpoint.errors import LogCorruptError
from forkpoint.ids import SessionName
from forkpoint.limits import TILE_TOKENS
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.logrecord import RECORD_TOKENS_MAX, StoredRecord, chain_at, read_stretch
from forkpoint.statestore.records import LogSlice
from forkpoint.statestore.redis.access import Access
from forkpoint.statestore.redis.functions import Refusal
from forkpoint.statestore.redis.hashes import chain_from
from forkpoint.statestore.redis.refusals import log_goes_on, session_error
from forkpoint.statestore.rules import check_position

LOOK_BACK: Final = RECORD_TOKENS_MAX + TILE_TOKENS
"""No read that begins at p needs anything before p - this (logrecord.read_stretch)."""
ROOM: Final = 2048
"""Records in one reply: a server that gathers them serves nobody else meanwhile. The rest is fetched in more steps."""


@dataclass(frozen=True, slots=True)
class FetchedLog:
    """A session's head and the records around one stretch of its log: a RecordSource for exactly that stretch."""

    branch: str
    chain: HashChain
    """At the head."""
    epoch: int
    start: int | None
    """Of the record that covers the stretch's first position."""
    records: Sequence[StoredRecord]
    goes_on: bool
    """A record lies behind the head."""

    def covering(self, position: int) -> int | None:
        """RecordSource.covering, of the stretch's first position."""
        return self.start

    def between(self, first: int, stop: int) -> Iterable[StoredRecord]:
        """RecordSource.between, of the stretch."""
        return self.records


async def fetch(access: Access, name: SessionName, start: int, limit: int, deleted: bool = False) -> FetchedLog:
    """A session's head, and what a read of `limit` tokens from `start` needs. Limit 0: the head alone. Raises
    NotFoundError, also for a deleted session unless `deleted`."""
    base = access.keys.workflow(name.workflow)
    arguments = (name.session, int(deleted), max(0, start), limit, LOOK_BACK, ROOM, TILE_TOKENS)
    try:
        row, parts, covering, found, everything, goes_on = await access.functions.ask(base, "read_log", *arguments)
    except Refusal as refusal:
        raise session_error(refusal, name) from None
    branch, head, at_head, epoch, _state = row
    chain = chain_from(int(head), bytes(at_head))
    records = [record for branch_, cut, data in found for record in _records(int(branch_), int(cut), data)]
    if everything != b"1":
        stop = min(chain.position, start + limit)
        records = await _fetch_rest(access, base, parts, records, stop)
    covered = int(covering) if covering else None
    return FetchedLog(bytes(branch).decode(), chain, int(epoch), covered, records, goes_on == b"1")


def _records(branch: int, cut: int, data: bytes) -> Iterator[StoredRecord]:
    """The records in frames (reads.lua)."""
    at = 0
    while at < len(data):
        line = data.index(b"\n", at)
        start, size = data[at:line].split(b" ")
        at = line + 1 + int(size)
        yield StoredRecord(branch, int(start), cut, data[line + 1 : at])


async def _fetch_rest(
    access: Access, base: str, parts: Sequence[Any], records: list[StoredRecord], stop: int
) -> list[StoredRecord]:
    """The records of a stretch up to `stop`, given its first. Below the head nothing changes, so that this may take as
    many steps as it likes."""
    last = records[-1]
    remaining = [(int(branch), int(begin), int(cut)) for branch, begin, cut in parts]
    while remaining[0][0] != last.branch:
        remaining.pop(0)
    start = last.start + 1
    for branch, begin, cut in remaining:
        begin, count = max(begin, start), ROOM
        while begin < min(stop, cut) and count == ROOM:
            reply = await access.functions.read(base, "read_records", branch, begin, min(stop, cut), ROOM)
            more, count = list(_records(branch, cut, reply[0])), int(reply[1])
            records += more
            begin = more[-1].start + 1 if more else begin
    return records


async def position_chain(
    access: Access, name: SessionName, position: int, deleted: bool = False
) -> tuple[FetchedLog, HashChain]:
    """The chain at a position of the session's log, and the head it was read under. Raises NotFoundError,
    PositionBeyondHeadError, LogCorruptError."""
    fetched = await fetch(access, name, position - 1, 1 if position > 0 else 0, deleted)
    check_position(name, position, fetched.chain.position)
    return fetched, chain_of(access, name, fetched, position)


def chain_of(access: Access, name: SessionName, fetched: FetchedLog, position: int) -> HashChain:
    """The chain at the end of the one token that was fetched, `position` - 1. Raises LogCorruptError."""
    if position == fetched.chain.position:
        return fetched.chain.copy()
    return chain_at(str(name), fetched, access.root, position)


async def read(access: Access, name: SessionName, start: int, limit: int) -> LogSlice:
    """Catalog.read_log."""
    fetched = await fetch(access, name, start, max(0, limit))
    head = fetched.chain.position
    check_position(name, start, head)
    stop = min(head, start + limit)
    if stop <= start:
        return LogSlice(start, (), (), ())
    stretch = read_stretch(str(name), fetched, start, stop)
    if stop == head:
        if stretch.chain is None or stretch.chain.head_hash() != fetched.chain.head_hash():
            grid = head - head % TILE_TOKENS
            raise LogCorruptError(str(name), grid, grid, "the log does not lead to the session's head hash")
        if fetched.goes_on:
            raise log_goes_on(name, head)
    return stretch.slice(start)
