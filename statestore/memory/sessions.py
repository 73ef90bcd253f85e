"""Sessions of the in-memory catalog."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from forkpoint.errors import AlreadyExistsError, EtagMismatchError, NotFoundError, PreconditionError
from forkpoint.ids import SessionName
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.memory.rows import MemoryRows
from forkpoint.statestore.memory.store import MemoryBranch, MemorySession
from forkpoint.statestore.records import (
    CheckpointPolicy,
    FinishReason,
    NewSession,
    RequestKey,
    SessionRow,
    SessionState,
)
from forkpoint.statestore.rowjson import session_from_value, session_to_value
from forkpoint.statestore.rules import (
    begins_migration,
    check_cut_over,
    check_epoch,
    check_owned,
    check_release,
    count_takeover,
)

NO_MIGRATION: Final[Mapping[str, str]] = {"migration": "", "migration_target": ""}
"""Fields of a row whose owner gave no word that it may go."""


class MemorySessions(MemoryRows):
    """Names, owners, epochs."""

    async def create_session(self, new: NewSession, request: RequestKey | None = None) -> tuple[SessionRow, bool]:
        answer = self._answer(request, "create_session")
        if answer is not None:
            return session_from_value(answer), True
        self._check_new(new.name)
        row = self._insert(new, None, HashChain(0, self._root), None)
        self._keep(request, "create_session", session_to_value(row))
        return row, False

    def _check_new(self, name: SessionName) -> None:
        self._workflow(name.workflow)
        if name in self._open().sessions:
            raise AlreadyExistsError(str(name))

    def _insert(
        self, new: NewSession, parent_branch: int | None, chain: HashChain, parent: MemorySession | None
    ) -> SessionRow:
        """A session on a new branch; the name was checked."""
        tables, now = self._open(), self._clock.wall_us()
        branch = self._add_branch(new.name.workflow, parent_branch, chain.position)
        row = SessionRow(
            name=new.name,
            branch=str(branch),
            state=SessionState.ACTIVE,
            state_reason="",
            head=chain.position,
            head_hash=chain.head_hash(),
            epoch=0,
            owner="",
            parent=None if parent is None else parent.row.name,
            fork_position=chain.position,
            seed=new.seed,
            policy=new.policy,
            labels=dict(new.labels),
            transient=new.transient,
            exact=True if parent is None else parent.row.exact,
            numerics_ids=() if parent is None else parent.row.numerics_ids,
            expire_us=new.expire_us,
            create_us=now,
            update_us=now,
            delete_us=None,
            purge_us=None,
            revision=1,
            standbys=new.standbys,
        )
        tables.sessions[new.name] = MemorySession(row, branch, chain.copy())
        return session_copy(row)

    def _add_branch(self, workflow: str, parent: int | None, fork_position: int) -> int:
        tables = self._open()
        tables.branches.append(MemoryBranch(parent, fork_position))
        tables.lineages[workflow] = len(tables.branches)
        return len(tables.branches) - 1

    async def get_session(self, name: SessionName) -> SessionRow:
        return session_copy(self._load(name).row)

    async def list_sessions(
        self, workflow: str | None, after: SessionName | None, limit: int, show_deleted: bool = False
    ) -> list[SessionRow]:
        rows = [stored.row for _, stored in sorted(self._open().sessions.items())]
        found = [
            session_copy(row)
            for row in rows
            if (workflow is None or row.name.workflow == workflow)
            and (after is None or row.name > after)
            and (show_deleted or row.state is not SessionState.DELETED)
        ]
        return found[:limit]

    async def list_open_generations(self) -> list[SessionRow]:
        found = [stored.row for stored in self._open().sessions.values() if stored.open_generation is not None]
        return [session_copy(row) for row in sorted(found, key=lambda row: (-row.update_us, row.name))]

    async def update_session(
        self,
        name: SessionName,
        revision: int | None,
        labels: dict[str, str] | None = None,
        policy: CheckpointPolicy | None = None,
        expire_us: int | None = None,
        standbys: int | None = None,
    ) -> SessionRow:
        row = self._live(name).row
        if revision is not None and revision != row.revision:
            raise EtagMismatchError(str(name), str(row.revision))
        return self._change(
            name,
            labels=dict(row.labels if labels is None else labels),
            policy=policy or row.policy,
            expire_us=row.expire_us if expire_us is None else expire_us,
            revision=row.revision + 1,
            standbys=row.standbys if standbys is None else standbys,
        )

    async def delete_session(self, name: SessionName, purge_us: int, request: RequestKey | None = None) -> SessionRow:
        answer = self._answer(request, "delete_session")
        if answer is not None:
            return session_from_value(answer)
        stored = self._live(name)
        self._finish(stored, FinishReason.CANCELLED)
        row = self._change(
            name,
            state=SessionState.DELETED,
            state_reason="",
            owner="",
            epoch=stored.row.epoch + 1,
            delete_us=self._clock.wall_us(),
            purge_us=purge_us,
            revision=stored.row.revision + 1,
            **NO_MIGRATION,
        )
        self._keep(request, "delete_session", session_to_value(row))
        return row

    async def undelete_session(self, name: SessionName) -> SessionRow:
        row = self._load(name).row
        self._workflow(name.workflow)
        if row.state is not SessionState.DELETED:
            raise PreconditionError(f"{name} is not deleted")
        return self._change(name, state=SessionState.PAUSED, delete_us=None, purge_us=None, revision=row.revision + 1)

    async def acquire(
        self, name: SessionName, incarnation: str, expected_epoch: int, request: RequestKey | None = None
    ) -> SessionRow:
        answer = self._answer(request, "acquire")
        if answer is not None:
            return session_from_value(answer)
        stored = self._live(name)
        current = stored.row
        check_epoch(name, expected_epoch, current.epoch)
        takeovers, takeover_head = count_takeover(current, incarnation, stored.open_generation is not None)
        row = self._change(
            name,
            owner=incarnation,
            epoch=current.epoch + 1,
            state=SessionState.ACTIVE,
            state_reason="",
            takeovers=takeovers,
            takeover_head=takeover_head,
            **NO_MIGRATION,
        )
        self._keep(request, "acquire", session_to_value(row))
        return row

    async def release(
        self, name: SessionName, epoch: int, state: SessionState, reason: str = "", request: RequestKey | None = None
    ) -> SessionRow:
        answer = self._answer(request, "release")
        if answer is not None:
            return session_from_value(answer)
        stored = self._live(name)
        check_release(stored.row, epoch, state, stored.open_generation)
        row = self._change(name, owner="", state=state, state_reason=reason, takeovers=0, **NO_MIGRATION)
        self._keep(request, "release", session_to_value(row))
        return row

    async def release_quarantine(self, name: SessionName, request: RequestKey | None = None) -> SessionRow:
        answer = self._answer(request, "release_quarantine")
        if answer is not None:
            return session_from_value(answer)
        if self._live(name).row.state is not SessionState.QUARANTINED:
            raise PreconditionError(f"{name} is not quarantined")
        row = self._change(name, owner="", state=SessionState.ACTIVE, state_reason="", takeovers=0, **NO_MIGRATION)
        self._keep(request, "release_quarantine", session_to_value(row))
        return row

    async def begin_migration(self, name: SessionName, epoch: int, migration: str, target: str) -> SessionRow:
        row = self._live(name).row
        if begins_migration(row, epoch, migration, target):
            return self._change(name, migration=migration, migration_target=target)
        return session_copy(row)

    async def end_migration(self, name: SessionName, epoch: int, migration: str) -> SessionRow:
        row = self._live(name).row
        check_epoch(name, epoch, row.epoch)
        if not migration or row.migration != migration:
            return session_copy(row)
        return self._change(name, **NO_MIGRATION)

    async def cut_over(
        self, name: SessionName, epoch: int, migration: str, incarnation: str, head: int, head_hash: bytes
    ) -> SessionRow:
        check_cut_over(self._live(name).row, epoch, migration, incarnation, head, head_hash)
        return self._change(name, owner=incarnation, epoch=epoch + 1, takeovers=0, **NO_MIGRATION)

    async def note_numerics(
        self, name: SessionName, epoch: int, numerics_ids: tuple[str, ...], exact: bool
    ) -> SessionRow:
        check_owned(self._live(name).row, epoch)
        return self._change(name, numerics_ids=numerics_ids, exact=exact)

    def _load(self, name: SessionName) -> MemorySession:
        stored = self._open().sessions.get(name)
        if stored is None:
            raise NotFoundError(str(name))
        return stored

    def _live(self, name: SessionName) -> MemorySession:
        stored = self._load(name)
        if stored.row.state is SessionState.DELETED:
            raise NotFoundError(str(name), "is deleted")
        return stored

    def _finish(self, stored: MemorySession, reason: FinishReason) -> None:
        """End the open generation, if there is one, at the head."""
        if stored.open_generation is None:
            return
        key = (stored.row.name, stored.open_generation)
        generations = self._open().generations
        generations[key] = replace(generations[key], finish=reason, end=stored.chain.position)
        stored.open_generation = None

    def _change(self, name: SessionName, **changes: Any) -> SessionRow:
        stored = self._load(name)
        stored.row = replace(stored.row, **changes, update_us=self._clock.wall_us())
        return session_copy(stored.row)


def session_copy(row: SessionRow) -> SessionRow:
    """A row whose labels are its own."""
    return replace(row, labels=dict(row.labels))
