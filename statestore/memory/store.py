"""What MemoryCatalog keeps: plain dictionaries of rows, and the records of a session across its ancestors."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from forkpoint.ids import SessionName
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.logrecord import StoredRecord
from forkpoint.statestore.records import (
    CheckpointRow,
    CollectorRow,
    GenerationRow,
    ManifestKey,
    ManifestRow,
    NodeRow,
    Pin,
    RequestKey,
    SessionRow,
    WorkflowRow,
)


@dataclass(slots=True)
class MemoryBranch:
    """A branch: where it comes from, and its own records in order."""

    parent: int | None
    fork_position: int
    starts: list[int] = field(default_factory=list)
    records: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class MemorySession:
    """A session row with what only the store needs."""

    row: SessionRow
    branch: int
    chain: HashChain
    rewound_from: int = 0
    open_generation: str | None = None


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer of a request id and when it was given."""

    digest: bytes
    call: str
    text: str
    create_us: int


@dataclass(slots=True)
class MemoryTables:
    """All rows of a store."""

    nodes: dict[str, NodeRow] = field(default_factory=dict)
    workflows: dict[str, WorkflowRow] = field(default_factory=dict)
    sessions: dict[SessionName, MemorySession] = field(default_factory=dict)
    branches: list[MemoryBranch] = field(default_factory=list)
    generations: dict[tuple[SessionName, str], GenerationRow] = field(default_factory=dict)
    checkpoints: dict[tuple[SessionName, str], CheckpointRow] = field(default_factory=dict)
    manifests: dict[int, ManifestRow] = field(default_factory=dict)
    """By number."""
    manifest_numbers: dict[ManifestKey, int] = field(default_factory=dict)
    manifests_written: int = 0
    pins: dict[str, Pin] = field(default_factory=dict)
    collectors: dict[str, CollectorRow] = field(default_factory=dict)
    condemned: dict[str, set[str]] = field(default_factory=dict)
    """By tier."""
    lineages: dict[str, int] = field(default_factory=dict)
    """By workflow."""
    absolved: dict[int, str] = field(default_factory=dict)
    absolutions: int = 0
    answers: dict[tuple[str, str, str], StoredAnswer] = field(default_factory=dict)


def answer_key(request: RequestKey) -> tuple[str, str, str]:
    """What a request id is unique within."""
    return request.caller, request.workflow, request.request_id


class MemoryRecords:
    """RecordSource over branches: the session's own and its ancestors."""

    def __init__(self, branches: list[MemoryBranch], branch: int, head: int) -> None:
        self._branches = branches
        self._parts: list[tuple[int, int, int]] = []
        current: int | None = branch
        cut = head
        while current is not None:
            begin = branches[current].fork_position
            self._parts.append((current, begin, cut))
            cut, current = min(cut, begin), branches[current].parent
        self._parts.reverse()

    def covering(self, position: int) -> int | None:
        """RecordSource.covering."""
        for branch, begin, cut in self._parts:
            if begin <= position < cut:
                starts = self._branches[branch].starts
                index = bisect.bisect_right(starts, position) - 1
                return starts[index] if index >= 0 else None
        return None

    def between(self, first: int, stop: int) -> Iterator[StoredRecord]:
        """RecordSource.between."""
        for branch, begin, cut in self._parts:
            if cut <= first or begin >= stop:
                continue
            owner = self._branches[branch]
            low = max(0, bisect.bisect_right(owner.starts, first) - 1)
            for index in range(low, bisect.bisect_left(owner.starts, min(stop, cut))):
                yield StoredRecord(branch, owner.starts[index], cut, owner.records[index])
