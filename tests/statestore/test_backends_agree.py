"""Every catalog against the one in memory: any sequence of calls gets the same answers, errors and rows."""

import random
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from forkpoint.errors import ForkpointError
from forkpoint.ids import SessionName
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.calls import AppendTokens, BeginGeneration, ForkSessions, StepCommit
from forkpoint.statestore.chain import grid_hashes, root_hash
from forkpoint.statestore.check import check
from forkpoint.statestore.memory.blobs import MemoryBlobs
from forkpoint.statestore.memory.catalog import MemoryCatalog
from forkpoint.statestore.records import (
    CheckpointPolicy,
    CheckpointRow,
    FinishReason,
    Kind,
    ManifestKey,
    Pin,
    RequestKey,
    SessionState,
    WorkflowRow,
)
from forkpoint.statestore.sqlite.catalog import SqliteCatalog
from tests.support.redis_stores import products, redis_catalog
from tests.support.store import MARKER, PARAMS, ManualClock, name, new

Call = Callable[[Catalog], Awaitable[Any]]
OWNERS = ("i1", "i1", "i2")
LEFT = {"BAD_MANIFEST", "UNREACHABLE_MANIFEST", "OWNER_GONE", "MIGRATION_LEFT", "PIN_LEFT", "CONDEMNED_LEFT"}
"""What check may find: no node is registered, no manifest is whole, and nobody collects."""


class RandomCalls:
    """Calls over few names, epochs, positions and request ids, so that they often collide."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def _request(self) -> RequestKey | None:
        rng = self._rng
        if rng.random() < 0.7:
            return None
        return RequestKey("me", "w", f"r{rng.randrange(25)}", bytes([rng.randrange(2)]))

    async def _expected(self, catalog: Catalog, session: str) -> tuple[int, int]:
        """(epoch, head) of a session, now and then wrong."""
        try:
            row = await catalog.get_session(name(session))
        except ForkpointError:
            return 0, 0
        rng = self._rng
        epoch = row.epoch - (rng.random() < 0.08)
        head = row.head + rng.choice((0, 0, 0, 0, 0, 0, -1, 1))
        return epoch, head

    async def next_call(self, catalog: Catalog) -> tuple[str, Call]:
        """A random call; `catalog` is only looked at."""
        rng, key = self._rng, self._request()
        session, other = f"s{rng.randrange(6)}", f"s{rng.randrange(6)}"
        epoch, head = await self._expected(catalog, session)
        tokens = tuple(rng.randrange(9) for _ in range(rng.choice((0, 1, 3, 16, 30))))
        position = rng.randint(0, max(head, 1))
        finish = rng.choice((None, None, FinishReason.STOP))
        generation = f"g{rng.randrange(4)}"
        n, owner = name(session), rng.choice(OWNERS)
        append = AppendTokens(n, epoch, tokens, rng.choice(list(Kind)), rng.choice((None, head)), None, key)
        begin = BeginGeneration(n, epoch, generation, PARAMS, tokens, rng.choice((None, head)), None, key)
        steps = [StepCommit(n, epoch, head, tokens, generation, (-0.5,) * len(tokens), finish)]
        steps.append(StepCommit(name(other), epoch, head, (1,), generation))
        children = (new(other), new(f"s{rng.randrange(6)}"))[: 1 + rng.randrange(2)]
        fork = ForkSessions(n, rng.choice((None, position)), children, key)
        choices: list[tuple[str, int, Call]] = [
            ("create", 3, lambda c: c.create_session(new(session, seed=epoch), key)),
            ("acquire", 4, lambda c: c.acquire(n, owner, epoch)),
            ("append", 9, lambda c: c.append(append)),
            ("begin", 6, lambda c: c.begin_generation(begin)),
            ("step", 9, lambda c: c.commit_step(steps)),
            ("read", 5, lambda c: c.read_log(n, position, 20)),
            ("fork", 3, lambda c: c.fork(fork)),
            ("rewind", 2, lambda c: c.rewind(n, epoch, position, key)),
            ("delete", 1, lambda c: c.delete_session(n, 5, key)),
            ("undelete", 2, lambda c: c.undelete_session(n)),
            ("release", 1, lambda c: c.release(n, epoch, SessionState.PAUSED, "why")),
            *self._moves(n, epoch, head, await self._head_hash(catalog, n)),
            ("numerics", 1, lambda c: c.note_numerics(n, epoch, ("a", "b"), False)),
            ("isolate", 1, lambda c: c.release(n, epoch, SessionState.QUARANTINED, "why", key)),
            ("let go", 1, lambda c: c.release_quarantine(n, key)),
            ("update", 1, lambda c: c.update_session(n, None, {"a": "b"}, CheckpointPolicy(7, True), standbys=epoch)),
            ("checkpoint", 4, await self._checkpoint(catalog, session, epoch, key)),
            ("checkpoints", 2, lambda c: c.list_checkpoints(n)),
            *self._retention(n, key),
            ("generations", 2, lambda c: c.list_generations(n)),
            ("open", 2, lambda c: c.open_generation(n)),
            ("workflow", 1, lambda c: c.delete_workflow("w")),
        ]
        label, _, call = rng.choices(choices, [weight for _, weight, _ in choices])[0]
        return label, call

    async def _head_hash(self, catalog: Catalog, n: SessionName) -> bytes:
        try:
            return (await catalog.get_session(n)).head_hash
        except ForkpointError:
            return bytes(32)

    def _moves(self, n: SessionName, epoch: int, head: int, head_hash: bytes) -> list[tuple[str, int, Call]]:
        rng = self._rng
        move, target = rng.choice(("m1", "m1", "m2")), rng.choice(OWNERS)
        return [
            ("begin move", 5, lambda c: c.begin_migration(n, epoch, move, target)),
            ("end move", 1, lambda c: c.end_migration(n, epoch, move)),
            ("cut over", 6, lambda c: c.cut_over(n, epoch, move, target, head, head_hash)),
        ]

    def _retention(self, n: SessionName, key: RequestKey | None) -> list[tuple[str, int, Call]]:
        rng = self._rng
        checkpoint, position = f"c{rng.randrange(6)}", rng.randrange(200)
        numerics = rng.choice((None, "n", "other"))
        pick, gone = rng.random(), rng.random() < 0.5

        async def drop(c: Catalog) -> object:
            return await c.drop_checkpoints("w", await c.lineage("w") - (not gone), [(n.session, checkpoint)])

        async def with_manifest(c: Catalog, act: Callable[[Catalog, ManifestKey], Awaitable[object]]) -> object:
            found = await c.scan_manifests(0, 1000)
            keys = sorted(scanned.row.key for scanned in found)
            return await act(c, keys[int(pick * len(keys))]) if keys else None

        return [
            ("delete checkpoint", 2, lambda c: c.delete_checkpoint(n, checkpoint, key)),
            ("nearest", 3, lambda c: c.nearest_checkpoint(n, position, numerics)),
            ("scan", 1, lambda c: c.scan_checkpoints("w", (n.session, checkpoint) if gone else None, 4)),
            ("drop", 1, drop),
            ("pin", 1, lambda c: with_manifest(c, lambda c, key: c.pin(Pin(checkpoint, "i", key)))),
            ("unpin", 1, lambda c: c.unpin(checkpoint)),
            ("pins", 1, lambda c: c.list_pins()),
            ("remove manifest", 1, lambda c: with_manifest(c, lambda c, key: c.remove_manifest(key))),
        ]

    async def _checkpoint(self, catalog: Catalog, session: str, epoch: int, key: RequestKey | None) -> Call:
        try:
            tokens = (await catalog.read_log(name(session), 0, 10_000)).token_ids
        except ForkpointError:
            tokens = ()
        grid, chain_hash = self._rng.choice(grid_hashes(root_hash(MARKER), tokens))
        wrong = self._rng.random() < 0.1
        checkpoint = f"c{self._rng.randrange(6)}"
        row = CheckpointRow(
            name(session), checkpoint, max(grid, len(tokens)), grid, bytes(32) if wrong else chain_hash, "n", False, 0
        )
        return lambda c: c.put_checkpoint(row, f"manifest {grid}".encode(), epoch, key)


async def outcome(call: Call, catalog: Catalog) -> object:
    """The result of a call, or its error's type and facts."""
    try:
        return await call(catalog)
    except ForkpointError as error:
        return type(error).__name__, error.facts()


def comparable(value: object) -> object:
    """Branch ids and manifests' numbers are each backend's own: keep that there is one, not which."""
    text = re.sub(r"number=\d+", "number=-", repr(value))
    return re.sub(r"branch='\d+'", "branch='-'", text)


async def everything(catalog: Catalog) -> list[object]:
    """All that can be asked of a catalog."""
    rows = await catalog.list_sessions(None, None, 1000, show_deleted=True)
    found: list[object] = [rows, await catalog.scan_manifests(0, 1000), await catalog.list_workflows("", 10)]
    for row in rows:
        if row.state is not SessionState.DELETED:
            found.append(await catalog.read_log(row.name, 0, 100_000))
            found.append(await catalog.list_generations(row.name))
            found.append(await catalog.list_checkpoints(row.name))
    return found


def make(backend: str, folder: Path, clock: ManualClock) -> Catalog:
    """An empty catalog of a backend."""
    if backend == "sqlite":
        return SqliteCatalog(folder / "catalog.db", clock, synchronous="OFF")
    return redis_catalog(backend, folder, clock)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("backend", ["sqlite", *products()])
async def test_a_catalog_gives_the_answers_of_the_one_in_memory(tmp_path: Path, backend: str, seed: int) -> None:
    clock_a, clock_b = ManualClock(), ManualClock()
    clock_a.wall_us = clock_b.wall_us = lambda: 1_700_000_000_000_000  # type: ignore[method-assign]
    memory: Catalog = MemoryCatalog(clock_a)
    other = make(backend, tmp_path, clock_b)
    calls, labels = RandomCalls(seed), set[str]()
    for catalog in (memory, other):
        await catalog.open(MARKER)
        await catalog.create_workflow(WorkflowRow("w"))
    for turn in range(400):
        label, call = await calls.next_call(memory)
        ours, theirs = await outcome(call, memory), await outcome(call, other)
        assert comparable(ours) == comparable(theirs), f"seed {seed}, call {turn}: {label}"
        labels.add(label)
    assert comparable(await everything(memory)) == comparable(await everything(other))
    for catalog in (memory, other):
        kinds = {finding.kind async for finding in check(catalog, MemoryBlobs())}
        assert kinds <= LEFT
        await catalog.close()
    assert len(labels) >= 15
