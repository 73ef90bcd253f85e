"""Log, generations and forks of the in-memory catalog."""

from collections.abc import Sequence
from dataclasses import replace

from forkpoint.errors import (
    AlreadyExistsError,
    EmptySessionError,
    LogCorruptError,
    NotFoundError,
    SessionBusyError,
)
from forkpoint.ids import SessionName
from forkpoint.limits import TILE_TOKENS
from forkpoint.statestore.calls import (
    AppendOutcome,
    AppendTokens,
    BeginGeneration,
    BeginOutcome,
    ForkOutcome,
    ForkSessions,
    StepCommit,
    StepOutcome,
    StepStatus,
)
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.logrecord import chain_at, read_stretch, write_records
from forkpoint.statestore.memory.sessions import NO_MIGRATION, MemorySessions
from forkpoint.statestore.memory.store import MemoryRecords, MemorySession
from forkpoint.statestore.records import GenerationRow, Kind, LogSlice, RequestKey, SessionRow
from forkpoint.statestore.rowjson import session_from_value, session_to_value
from forkpoint.statestore.rules import check_children, check_expected, check_owned, check_position


class MemoryLog(MemorySessions):
    """Tokens and the branches they lie on."""

    async def append(self, append: AppendTokens) -> AppendOutcome:
        answer = self._answer(append.request, "append")
        if answer is not None:
            start, head, head_hash, epoch = answer
            return AppendOutcome(start, head, bytes.fromhex(head_hash), epoch, True)
        stored = self._writable(append.session, append.epoch, append.expected_position, append.expected_head_hash)
        start = stored.row.head
        if append.past is not None:
            self._check_generation(append.session, append.past.generation, start)
        self._write(stored, append.epoch, append.kind, append.token_ids, append.logprobs)
        row = stored.row
        if append.past is not None:
            past = append.past
            self._open().generations[append.session, past.generation] = GenerationRow(
                generation=past.generation,
                session=append.session,
                request_id=past.request_id,
                start=start,
                params=past.params,
                finish=past.finish,
                end=row.head,
                input_start=past.input_start,
                branch=row.branch,
            )
        self._keep(append.request, "append", [start, row.head, row.head_hash.hex(), append.epoch])
        return AppendOutcome(start, row.head, row.head_hash, append.epoch, False)

    async def begin_generation(self, begin: BeginGeneration) -> BeginOutcome:
        answer = self._answer(begin.request, "begin_generation")
        if answer is not None:
            generation, head, head_hash, epoch = answer
            row = self._generation(begin.session, generation)
            return BeginOutcome(row, head, bytes.fromhex(head_hash), epoch, True)
        name = begin.session
        stored = self._writable(name, begin.epoch, begin.expected_position, begin.expected_head_hash)
        input_start = stored.row.head
        self._check_generation(name, begin.generation, input_start + len(begin.token_ids))
        generations = self._open().generations
        self._write(stored, begin.epoch, Kind.PROMPT, begin.token_ids)
        generations[name, begin.generation] = GenerationRow(
            generation=begin.generation,
            session=name,
            request_id="" if begin.request is None else begin.request.request_id,
            start=stored.row.head,
            params=begin.params,
            input_start=input_start if begin.token_ids else None,
            branch=stored.row.branch,
        )
        stored.open_generation = begin.generation
        head, head_hash = stored.row.head, stored.row.head_hash
        self._keep(begin.request, "begin_generation", [begin.generation, head, head_hash.hex(), begin.epoch])
        return BeginOutcome(generations[name, begin.generation], head, head_hash, begin.epoch, False)

    async def commit_step(self, commits: Sequence[StepCommit]) -> list[StepOutcome]:
        return [self._commit_one(commit) for commit in commits]

    def _commit_one(self, commit: StepCommit) -> StepOutcome:
        stored = self._open().sessions.get(commit.session)
        if stored is None:
            return StepOutcome(StepStatus.CONFLICT, 0, self._root, 0)
        status = StepStatus.COMMITTED
        if commit.epoch != stored.row.epoch or not stored.row.owner:
            status = StepStatus.STALE_EPOCH
        elif commit.start != stored.row.head or stored.open_generation != commit.generation:
            status = StepStatus.CONFLICT
        else:
            self._write(stored, commit.epoch, Kind.GENERATED, commit.token_ids, commit.logprobs)
            if commit.finish is not None:
                self._finish(stored, commit.finish)
        return StepOutcome(status, stored.row.head, stored.row.head_hash, stored.row.epoch)

    async def open_generation(self, name: SessionName) -> GenerationRow | None:
        generation = self._live(name).open_generation
        return None if generation is None else self._generation(name, generation)

    async def get_generation(self, name: SessionName, generation: str) -> GenerationRow:
        self._live(name)
        return self._generation(name, generation)

    async def list_generations(self, name: SessionName) -> list[GenerationRow]:
        branch = self._live(name).row.branch
        rows = [row for (owner, _), row in self._open().generations.items() if owner == name and row.branch == branch]
        return sorted(rows, key=lambda row: (row.start, row.generation))

    async def read_log(self, name: SessionName, start: int, limit: int) -> LogSlice:
        stored = self._live(name)
        head = stored.row.head
        check_position(name, start, head)
        stop = min(head, start + limit)
        if stop <= start:
            return LogSlice(start, (), (), ())
        stretch = read_stretch(str(name), self._records(stored), start, stop)
        if stop == head and (stretch.chain is None or stretch.chain.head_hash() != stored.row.head_hash):
            grid = head - head % TILE_TOKENS
            raise LogCorruptError(str(name), grid, grid, "the log does not lead to the session's head hash")
        return stretch.slice(start)

    # --- forks -------------------------------------------------------------------------------------------------
    async def fork(self, fork: ForkSessions) -> ForkOutcome:
        answer = self._answer(fork.request, "fork")
        if answer is not None:
            replayed = tuple(session_from_value(child) for child in answer["children"])
            return ForkOutcome(replayed, answer["position"], True)
        check_children(fork)
        parent = self._live(fork.parent)
        position = parent.row.head if fork.position is None else fork.position
        check_position(fork.parent, position, parent.row.head)
        chain = self._chain_at(parent, position)
        for child in fork.children:
            self._check_new(child.name)
        branch = self._branch_below(parent.branch, position)
        rows = tuple(self._insert(child, branch, chain, parent) for child in fork.children)
        self._keep(fork.request, "fork", {"position": position, "children": [session_to_value(row) for row in rows]})
        return ForkOutcome(rows, position, False)

    async def rewind(
        self, name: SessionName, epoch: int, position: int, request: RequestKey | None = None
    ) -> tuple[SessionRow, bool]:
        answer = self._answer(request, "rewind")
        if answer is not None:
            return session_from_value(answer), True
        stored = self._live(name)
        head = stored.row.head
        check_owned(stored.row, epoch)
        if stored.open_generation is not None:
            raise SessionBusyError(str(name), f"generation {stored.open_generation}", head)
        check_position(name, position, head)
        chain = self._chain_at(stored, position)
        stored.branch = self._add_branch(name.workflow, self._branch_below(stored.branch, position), position)
        stored.rewound_from = max(stored.rewound_from, head)
        stored.chain = chain
        row = self._change(
            name,
            branch=str(stored.branch),
            head=position,
            head_hash=chain.head_hash(),
            fork_position=min(stored.row.fork_position, position),
            **NO_MIGRATION,
        )
        self._keep(request, "rewind", session_to_value(row))
        return row, False

    # --- shared ------------------------------------------------------------------------------------------------
    def _writable(
        self, name: SessionName, epoch: int, expected_position: int | None, expected_head_hash: bytes | None
    ) -> MemorySession:
        """The session, when this writer may append to it now."""
        stored = self._live(name)
        row = stored.row
        check_owned(row, epoch)
        if stored.open_generation is not None:
            raise SessionBusyError(str(name), f"generation {stored.open_generation}", row.head)
        check_expected(name, row.head, row.head_hash, stored.rewound_from, expected_position, expected_head_hash)
        return stored

    def _write(
        self,
        stored: MemorySession,
        epoch: int,
        kind: Kind,
        token_ids: Sequence[int],
        logprobs: Sequence[float | None] = (),
    ) -> None:
        branch = self._open().branches[stored.branch]
        for start, record in list(write_records(stored.branch, stored.chain, epoch, kind, token_ids, logprobs)):
            branch.starts.append(start)
            branch.records.append(record)
        chain = stored.chain
        stored.row = replace(
            stored.row, head=chain.position, head_hash=chain.head_hash(), update_us=self._clock.wall_us()
        )

    def _check_generation(self, name: SessionName, generation: str, start: int) -> None:
        """Raises EmptySessionError, AlreadyExistsError."""
        if start == 0:
            raise EmptySessionError(str(name))
        if (name, generation) in self._open().generations:
            raise AlreadyExistsError(f"{name} generation {generation}")

    def _generation(self, name: SessionName, generation: str) -> GenerationRow:
        row = self._open().generations.get((name, generation))
        if row is None:
            raise NotFoundError(f"{name} generation {generation}")
        return row

    def _records(self, stored: MemorySession) -> MemoryRecords:
        return MemoryRecords(self._open().branches, stored.branch, stored.row.head)

    def _chain_at(self, stored: MemorySession, position: int) -> HashChain:
        if position == stored.chain.position:
            return stored.chain.copy()
        return chain_at(str(stored.row.name), self._records(stored), self._root, position)

    def _branch_below(self, branch: int, position: int) -> int | None:
        """The branch that owns the last token before `position`; None at 0."""
        branches = self._open().branches
        current: int | None = branch
        while current is not None and branches[current].fork_position >= position:
            current = branches[current].parent
        return current
