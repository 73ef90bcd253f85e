"""Looks at a store's log records themselves: under which epoch each was written."""

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Final
from urllib.parse import urlsplit

import redis

from forkpoint.statestore.logrecord import LogRecord, decode_record

PAGE: Final = 1000


def stale_records(records: Iterable[LogRecord]) -> list[str]:
    """Records of a branch that were written under an older epoch than one before them: by a node that had lost it."""
    branches = defaultdict[int, list[LogRecord]](list)
    for record in records:
        branches[record.branch].append(record)
    found = []
    for branch, own in branches.items():
        own.sort(key=lambda record: record.start)
        for earlier, later in pairwise(own):
            if later.epoch < earlier.epoch:
                found.append(f"branch {branch}: epoch {later.epoch} at {later.start} behind epoch {earlier.epoch}")
    return found


def records_in(url: str) -> Iterable[LogRecord]:
    """All records of a catalog, read past its code."""
    parts = urlsplit(url)
    return _sqlite_records(parts.path) if parts.scheme == "sqlite" else _redis_records(parts.hostname, parts.port)


def _sqlite_records(path: str) -> Iterator[LogRecord]:
    with closing(sqlite3.connect(path)) as database:
        for branch, start, data in database.execute("SELECT branch, start, record FROM log"):
            yield decode_record(bytes(data), branch, start)


def _redis_records(host: str | None, port: int | None) -> Iterator[LogRecord]:
    """One stream a branch, whose entries are named by the records' starts."""
    with redis.Redis(host or "", port or 6379, socket_timeout=30) as client:
        for key in client.scan_iter(match="*:log:*", count=PAGE):
            branch, after = int(key.rpartition(b":")[2]), b"-"
            while entries := client.xrange(key, after, b"+", PAGE):
                for entry, fields in entries:
                    yield decode_record(fields[b"r"], branch, int(entry.partition(b"-")[0]))
                after = b"(" + entries[-1][0]
