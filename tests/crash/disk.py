"""A disk that keeps only what was synced: recorded operations, and what may be left of them after a crash.

Content belongs to a file (an inode), names to a folder. A write is durable once its file is synced, a name once its
folder is; until then each of them may or may not have reached the disk, whatever became of the others.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

SECTOR = 512


@dataclass(frozen=True)
class Operation:
    """One recorded operation. `target` is a file number for content, a folder for names."""

    kind: str
    """write, truncate, sync; link, unlink, rename, sync_folder; ack (a mark of the script)."""
    target: object
    offset: int = 0
    data: bytes = b""
    name: str = ""
    source: str = ""
    file: int = -1


@dataclass
class DiskState:
    """What lies on the disk: contents by file, and files by path."""

    contents: dict[int, bytearray] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    shared: set[int] = field(default_factory=set)
    """Files whose content another state may hold too."""

    def copy(self) -> "DiskState":
        """A copy; either of the two copies a file's content when it first changes it."""
        self.shared = set(self.contents)
        return DiskState(dict(self.contents), dict(self.names), set(self.contents))

    def _own(self, file: int, size: int) -> bytearray:
        """The content of a file, ours to change and at least `size` bytes long."""
        if file in self.shared:
            self.shared.discard(file)
            self.contents[file] = bytearray(self.contents[file])
        content = self.contents.setdefault(file, bytearray())
        content.extend(bytes(max(0, size - len(content))))
        return content

    def apply(self, operation: Operation, length: int | None = None) -> None:
        """Let an operation (or, of a write, its first `length` bytes) reach the disk."""
        if operation.kind == "write":
            data = operation.data if length is None else operation.data[:length]
            content = self._own(operation.file, operation.offset)
            content[operation.offset : operation.offset + len(data)] = data
        elif operation.kind == "truncate":
            del self._own(operation.file, operation.offset)[operation.offset :]
        elif operation.kind == "link":
            self.names[operation.name] = operation.file
        elif operation.kind == "unlink":
            self.names.pop(operation.name, None)
        elif operation.kind == "rename":
            self.names.pop(operation.source, None)
            self.names[operation.name] = operation.file

    def files(self) -> dict[str, bytes]:
        """Path -> content of everything that has a name."""
        return {path: bytes(self.contents.get(file, b"")) for path, file in self.names.items()}


@dataclass(frozen=True)
class Crash:
    """A crash: what is on the disk, and how far the script was."""

    point: int
    """Index of the last recorded operation."""
    acked: int
    """Actions that were acknowledged."""
    state: DiskState
    story: str


class Replay:
    """Replays a recording and yields, after every operation, the disks that a crash there may leave."""

    def __init__(self, operations: list[Operation]) -> None:
        self._operations = operations

    def _points(self) -> Iterator[tuple[int, int, int, DiskState, list[tuple[int, Operation]]]]:
        """(index, acknowledged actions, number of syncs, durable state, pending operations) after each operation."""
        durable, pending, acked, syncs = DiskState(), list[tuple[int, Operation]](), 0, 0
        for index, operation in enumerate(self._operations):
            if operation.kind == "ack":
                acked += 1
            elif operation.kind in ("sync", "sync_folder"):
                reached = [item for item in pending if item[1].target == operation.target]
                pending = [item for item in pending if item[1].target != operation.target]
                for _, item in reached:
                    durable.apply(item)
                syncs += 1
            else:
                pending.append((index, operation))
            yield index, acked, syncs, durable, pending

    def crashes(self) -> Iterator[Crash]:
        """All kept, all dropped, each alone dropped, each alone kept, the last torn at sectors. A disk that a crash
        one operation earlier would have left as well is not yielded again."""
        seen: set[tuple[int, int, frozenset[int], int]] = set()
        for index, acked, syncs, durable, pending in self._points():
            everything = frozenset(number for number, _ in pending)
            variants = [(everything, -1, "all kept"), (frozenset[int](), -1, "all dropped")]
            for number, operation in pending:
                variants.append((everything - {number}, -1, f"{operation.kind} {number} dropped"))
                variants.append((frozenset({number}), -1, f"{operation.kind} {number} alone kept"))
            if pending and pending[-1][1].kind == "write":
                for length in range(SECTOR, len(pending[-1][1].data), SECTOR):
                    variants.append((everything, length, f"the last write torn at {length}"))
            for kept, torn, story in variants:
                if (key := (acked, syncs, kept, torn)) not in seen:
                    seen.add(key)
                    yield Crash(index, acked, _after(durable, pending, kept, torn), story)

    def random_crashes(self, count: int, seed: int, first: int) -> Iterator[Crash]:
        """`count` crashes at random points from `first` on, each with a random subset of what was not synced."""
        rng = random.Random(seed)
        numbers = [index for index, _, _, _, pending in self._points() if len(pending) > 1 and index >= first]
        chosen = sorted(rng.choices(numbers, k=count))
        for index, acked, _, durable, pending in self._points():
            while chosen and chosen[0] == index:
                chosen.pop(0)
                kept = frozenset(number for number, _ in pending if rng.random() < 0.5)
                yield Crash(index, acked, _after(durable, pending, kept, -1), f"subset {sorted(kept)}")


def _after(durable: DiskState, pending: list[tuple[int, Operation]], kept: frozenset[int], torn: int) -> DiskState:
    state = durable.copy()
    for position, (number, operation) in enumerate(pending):
        if number in kept:
            last = position == len(pending) - 1
            state.apply(operation, torn if last and torn >= 0 else None)
    return state
