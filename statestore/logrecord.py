"""One record of the token log, and how a stretch of records is verified. Layout: docs/formats.md.

A record carries its branch, start and epoch under a CRC, so that a record at another record's place is found, and
the chain's link at its start, so that the head hash at any position needs a look at no more than two dozen records.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol
from zlib import crc32

from forkpoint.errors import LogCorruptError
from forkpoint.limits import DIGEST_BYTES, TILE_TOKENS
from forkpoint.statestore.chain import TOKEN_BYTES, HashChain, pack_tokens, unpack_tokens
from forkpoint.statestore.records import Kind, LogSlice

VERSION: Final = 1
RECORD_TOKENS_MAX: Final = 4096
"""A longer append is cut into several records: reading one token never reads more than 16 KiB of ids."""
_HEADER: Final = struct.Struct(f"<BBBBIQQQ{DIGEST_BYTES}s")
_CRC: Final = struct.Struct("<I")
_HAS_LOGPROBS: Final = 1
_LOGPROB_BYTES: Final = 8
_NO_LOGPROB: Final = struct.pack("<d", math.nan)


@dataclass(frozen=True, slots=True)
class LogRecord:
    """Tokens [start, start + len(tokens) / 4) of one branch, all of one kind."""

    branch: int
    start: int
    epoch: int
    kind: Kind
    chain: bytes
    """h(16 * (start // 16))."""
    tokens: bytes
    """uint32 little-endian ids."""
    logprobs: bytes = b""
    """float64 little-endian, one a token and NaN where there is none; empty when no token has one."""

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens) // TOKEN_BYTES


def encode_record(record: LogRecord) -> bytes:
    """The record as stored."""
    flags = _HAS_LOGPROBS if record.logprobs else 0
    count = len(record.tokens) // TOKEN_BYTES
    header = _HEADER.pack(
        VERSION, record.kind.value, flags, 0, count, record.branch, record.start, record.epoch, record.chain
    )
    body = header + record.tokens + record.logprobs
    return body + _CRC.pack(crc32(body))


def decode_record(data: bytes, branch: int, start: int) -> LogRecord:
    """The record that is stored under (branch, start). Raises ValueError naming what is wrong."""
    if len(data) < _HEADER.size + _CRC.size:
        raise ValueError(f"{len(data)} bytes are no record")
    body = data[: -_CRC.size]
    if _CRC.unpack_from(data, len(body))[0] != crc32(body):
        raise ValueError("record checksum differs")
    version, kind, flags, reserved, count, own_branch, own_start, epoch, chain = _HEADER.unpack_from(body)
    if version != VERSION or reserved != 0 or flags & ~_HAS_LOGPROBS:
        raise ValueError(f"record version {version} is unknown, this process reads {VERSION}")
    if (own_branch, own_start) != (branch, start):
        raise ValueError(f"a record of branch {own_branch} at {own_start} lies at branch {branch}, {start}")
    tokens_stop = _HEADER.size + count * TOKEN_BYTES
    if count == 0 or len(body) != tokens_stop + (count * _LOGPROB_BYTES if flags & _HAS_LOGPROBS else 0):
        raise ValueError(f"{len(body)} bytes do not hold {count} tokens")
    return LogRecord(branch, start, epoch, Kind(kind), chain, body[_HEADER.size : tokens_stop], body[tokens_stop:])


def write_records(
    branch: int,
    chain: HashChain,
    epoch: int,
    kind: Kind,
    token_ids: Sequence[int],
    logprobs: Sequence[float | None] = (),
) -> Iterator[tuple[int, bytes]]:
    """(start, record) pairs that append `token_ids` at `chain`, which is moved to their end."""
    for offset in range(0, len(token_ids), RECORD_TOKENS_MAX):
        tokens = pack_tokens(token_ids[offset : offset + RECORD_TOKENS_MAX])
        packed = pack_logprobs(logprobs[offset : offset + RECORD_TOKENS_MAX])
        start = chain.position
        yield start, encode_record(LogRecord(branch, start, epoch, kind, chain.grid_hash, tokens, packed))
        chain.extend_packed(tokens)


def grow_record(record: bytes, tokens: bytes, logprobs: Sequence[float | None] = ()) -> bytes:
    """A record that is known to be whole, with more tokens (uint32 little-endian) at its end."""
    version, kind, flags, reserved, count, *place = _HEADER.unpack_from(record)
    more = len(tokens) // TOKEN_BYTES
    new = pack_logprobs(logprobs)
    if new or flags & _HAS_LOGPROBS:
        border = _HEADER.size + count * TOKEN_BYTES
        old = record[border : -_CRC.size] or _NO_LOGPROB * count
        tokens = record[_HEADER.size : border] + tokens + old + (new or _NO_LOGPROB * more)
        flags |= _HAS_LOGPROBS
    else:
        tokens = record[_HEADER.size : -_CRC.size] + tokens
    body = _HEADER.pack(version, kind, flags, reserved, count + more, *place) + tokens
    return body + _CRC.pack(crc32(body))


def pack_logprobs(logprobs: Sequence[float | None]) -> bytes:
    """float64 little-endian with NaN for None; empty when all are None."""
    if not logprobs or all(value is None for value in logprobs):
        return b""
    return struct.pack(f"<{len(logprobs)}d", *(math.nan if value is None else value for value in logprobs))


def unpack_logprobs(data: bytes, count: int) -> list[float | None]:
    """`count` values; the inverse of pack_logprobs."""
    if not data:
        return [None] * count
    return [None if math.isnan(value) else value for value in struct.unpack(f"<{count}d", data)]


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """A record as a backend found it: its key, its bytes, and the position at which its branch is cut."""

    branch: int
    start: int
    cut: int
    data: bytes


class RecordSource(Protocol):
    """One session's records across its ancestors, as a backend finds them."""

    def covering(self, position: int) -> int | None:
        """Start of the record that holds `position`, None when no record does."""
        ...

    def between(self, first: int, stop: int) -> Iterable[StoredRecord]:
        """Records that overlap [first, stop), ascending."""
        ...


@dataclass(slots=True)
class Stretch:
    """A verified stretch of a log and the chain at its end."""

    start: int
    tokens: bytearray = field(default_factory=bytearray)
    kinds: list[Kind] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    chain: HashChain | None = None

    def slice(self, start: int) -> LogSlice:
        """The part from `start` on."""
        skip = start - self.start
        token_ids = unpack_tokens(bytes(self.tokens[skip * TOKEN_BYTES :]))
        return LogSlice(start, tuple(token_ids), tuple(self.kinds[skip:]), tuple(self.logprobs[skip:]))


def read_stretch(session: str, source: RecordSource, start: int, stop: int) -> Stretch:
    """Read and verify tokens [start, stop), start < stop, with up to 4,111 tokens before them.

    Raises LogCorruptError when a record is missing, damaged, or off the chain.
    """
    covering = source.covering(start)
    if covering is None:
        raise LogCorruptError(session, start, start, "a record is missing")
    first = covering - covering % TILE_TOKENS
    stretch = Stretch(first)
    position = first
    linked = first
    for stored in source.between(first, stop):
        try:
            record = decode_record(stored.data, stored.branch, stored.start)
        except ValueError as error:
            raise LogCorruptError(session, position, position, str(error)) from error
        if record.start > position or (record.start < position and position != first):
            raise LogCorruptError(session, position, position, f"the next record starts at {record.start}")
        if stretch.chain is None and record.start >= covering:
            stretch.chain = HashChain(record.start, record.chain, bytes(stretch.tokens))
        elif stretch.chain is not None and stretch.chain.grid_hash != record.chain:
            raise LogCorruptError(session, linked, linked, "the hash chain does not fit")
        linked = record.start - record.start % TILE_TOKENS
        skip, last = position - record.start, min(record.stop, stored.cut, stop)
        _take(stretch, record, skip, last - record.start)
        position = last
    if position < stop or stretch.chain is None:
        raise LogCorruptError(session, position, position, "a record is missing")
    return stretch


def _take(stretch: Stretch, record: LogRecord, skip: int, upto: int) -> None:
    """Add tokens [skip, upto) of a record."""
    count = len(record.tokens) // TOKEN_BYTES
    tokens = record.tokens[skip * TOKEN_BYTES : upto * TOKEN_BYTES]
    stretch.tokens += tokens
    stretch.kinds.extend([record.kind] * (upto - skip))
    stretch.logprobs.extend(unpack_logprobs(record.logprobs, count)[skip:upto])
    if stretch.chain is not None:
        stretch.chain.extend_packed(tokens)


def chain_at(session: str, source: RecordSource, root: bytes, position: int) -> HashChain:
    """The chain at `position`, from the few records around it. Raises LogCorruptError."""
    if position == 0:
        return HashChain(0, root)
    chain = read_stretch(session, source, position - 1, position).chain
    assert chain is not None
    return chain
