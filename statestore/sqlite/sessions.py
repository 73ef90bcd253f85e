"""Sessions: names that point at branches, with an owner, an epoch and a head."""

import json
from dataclasses import dataclass
from typing import Any, Final

from forkpoint.errors import AlreadyExistsError, EtagMismatchError, NotFoundError, PreconditionError
from forkpoint.ids import SessionName
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.records import CheckpointPolicy, NewSession, RequestKey, SessionRow, SessionState
from forkpoint.statestore.rowjson import dump, session_from_value, session_to_value
from forkpoint.statestore.rules import check_epoch, check_owned, check_release, count_takeover
from forkpoint.statestore.sqlite import pending, requests, workflows
from forkpoint.statestore.sqlite.pending import Pending
from forkpoint.statestore.sqlite.tx import Tx

_COLUMNS: Final = (
    "workflow, session, branch, state, state_reason, epoch, owner, head, grid_hash, tail, rewound_from,"
    " open_generation, parent, fork_position, seed, every_tokens, on_turn_end, labels, transient, exact, numerics_ids,"
    " expire_us, create_us, update_us, delete_us, purge_us, revision, keep_last, standbys, migration,"
    " migration_target, takeovers, takeover_head"
)
NO_MIGRATION: Final = "migration = '', migration_target = ''"
"""Assignments of a row whose owner gave no word that it may go."""
_BY_NAME: Final = "WHERE workflow = ? AND session = ?"


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session row with what only the store needs."""

    row: SessionRow
    branch: int
    chain: HashChain
    rewound_from: int
    """The highest head that a rewind gave up."""
    open_generation: str | None
    pending: Pending | None = None
    """Tokens that are not in `log` yet; the row's head and the chain count them."""


@dataclass(frozen=True, slots=True)
class Birth:
    """Where a new session begins: a new branch's parent and position, and what it inherits."""

    parent_branch: int | None
    chain: HashChain
    parent: SessionName | None = None
    exact: bool = True
    numerics_ids: tuple[str, ...] = ()


def load(tx: Tx, name: SessionName) -> StoredSession:
    """The session, deleted or not. Raises NotFoundError."""
    row = tx.one(f"SELECT {_COLUMNS} FROM sessions {_BY_NAME}", name.workflow, name.session)
    if row is None:
        raise NotFoundError(str(name))
    return _stored(tx, row)


def live(tx: Tx, name: SessionName) -> StoredSession:
    """The session unless it is deleted. Raises NotFoundError."""
    stored = load(tx, name)
    if stored.row.state is SessionState.DELETED:
        raise NotFoundError(str(name), "is deleted")
    return stored


def create(tx: Tx, new: NewSession, request: RequestKey | None) -> tuple[SessionRow, bool]:
    """Catalog.create_session."""
    answer = requests.find(tx, request, "create_session")
    if answer is not None:
        return session_from_value(answer), True
    row = insert(tx, new, Birth(None, HashChain(0, tx.root)))
    requests.store(tx, request, "create_session", session_to_value(row))
    return row, False


def insert(tx: Tx, new: NewSession, birth: Birth) -> SessionRow:
    """A session on a branch of its own. Raises AlreadyExistsError; NotFoundError for the workflow."""
    name, chain = new.name, birth.chain
    workflows.get(tx, name.workflow)
    if tx.one(f"SELECT 1 FROM sessions {_BY_NAME}", name.workflow, name.session):
        raise AlreadyExistsError(str(name))
    branch = add_branch(tx, name.workflow, birth.parent_branch, chain.position)
    tx.run(
        f"INSERT INTO sessions ({_COLUMNS}) VALUES ({', '.join('?' * 33)})",
        name.workflow,
        name.session,
        branch,
        SessionState.ACTIVE.value,
        "",
        0,
        "",
        chain.position,
        chain.grid_hash,
        chain.tail,
        0,
        None,
        None if birth.parent is None else birth.parent.session,
        chain.position,
        new.seed,
        new.policy.every_tokens,
        int(new.policy.on_turn_end),
        dump(new.labels),
        int(new.transient),
        int(birth.exact),
        dump(list(birth.numerics_ids)),
        new.expire_us,
        tx.now_us,
        tx.now_us,
        None,
        None,
        1,
        new.policy.keep_last,
        new.standbys,
        "",
        "",
        0,
        0,
    )
    return load(tx, name).row


def add_branch(tx: Tx, workflow: str, parent: int | None, fork_position: int) -> int:
    """A new, empty branch; returns its id."""
    tx.run("INSERT INTO branches (workflow, parent, fork_position) VALUES (?, ?, ?)", workflow, parent, fork_position)
    return tx.db.last_insert_rowid()


def list_some(
    tx: Tx, workflow: str | None, after: SessionName | None, limit: int, show_deleted: bool
) -> list[SessionRow]:
    """Catalog.list_sessions."""
    where, values = ["1"], list[Any]()
    if workflow is not None:
        where.append("workflow = ?")
        values.append(workflow)
    if after is not None:
        where.append("(workflow, session) > (?, ?)")
        values += [after.workflow, after.session]
    if not show_deleted:
        where.append("state != 'DELETED'")
    sql = f"SELECT {_COLUMNS} FROM sessions WHERE {' AND '.join(where)} ORDER BY workflow, session LIMIT ?"
    return [_stored(tx, row).row for row in tx.rows(sql, *values, limit)]


def list_open_generations(tx: Tx) -> list[SessionRow]:
    """Catalog.list_open_generations."""
    found = tx.rows(f"SELECT {_COLUMNS} FROM sessions WHERE open_generation IS NOT NULL ORDER BY workflow, session")
    return sorted((_stored(tx, row).row for row in found), key=lambda row: row.update_us, reverse=True)


def update(
    tx: Tx,
    name: SessionName,
    revision: int | None,
    labels: dict[str, str] | None,
    policy: CheckpointPolicy | None,
    expire_us: int | None,
    standbys: int | None,
) -> SessionRow:
    """Catalog.update_session."""
    row = live(tx, name).row
    if revision is not None and revision != row.revision:
        raise EtagMismatchError(str(name), str(row.revision))
    policy = policy or row.policy
    return change(
        tx,
        name,
        "labels = ?, every_tokens = ?, on_turn_end = ?, keep_last = ?, expire_us = ?, standbys = ?,"
        " revision = revision + 1",
        dump(row.labels if labels is None else labels),
        policy.every_tokens,
        int(policy.on_turn_end),
        policy.keep_last,
        row.expire_us if expire_us is None else expire_us,
        row.standbys if standbys is None else standbys,
    )


def delete(tx: Tx, name: SessionName, purge_us: int, request: RequestKey | None) -> SessionRow:
    """Catalog.delete_session."""
    answer = requests.find(tx, request, "delete_session")
    if answer is not None:
        return session_from_value(answer)
    stored = live(tx, name)
    if stored.open_generation is not None:
        tx.run(
            f"UPDATE generations SET finish = 'CANCELLED', stop = ? {_BY_NAME} AND generation = ?",
            stored.row.head,
            name.workflow,
            name.session,
            stored.open_generation,
        )
    row = change(
        tx,
        name,
        "state = 'DELETED', state_reason = '', owner = '', epoch = epoch + 1, open_generation = NULL,"
        f" delete_us = ?, purge_us = ?, revision = revision + 1, {NO_MIGRATION}",
        tx.now_us,
        purge_us,
    )
    requests.store(tx, request, "delete_session", session_to_value(row))
    return row


def undelete(tx: Tx, name: SessionName) -> SessionRow:
    """Catalog.undelete_session."""
    row = load(tx, name).row
    workflows.get(tx, name.workflow)
    if row.state is not SessionState.DELETED:
        raise PreconditionError(f"{name} is not deleted")
    return change(tx, name, "state = 'PAUSED', delete_us = NULL, purge_us = NULL, revision = revision + 1")


def acquire(tx: Tx, name: SessionName, incarnation: str, expected_epoch: int, request: RequestKey | None) -> SessionRow:
    """Catalog.acquire."""
    answer = requests.find(tx, request, "acquire")
    if answer is not None:
        return session_from_value(answer)
    stored = live(tx, name)
    check_epoch(name, expected_epoch, stored.row.epoch)
    row = change(
        tx,
        name,
        "owner = ?, epoch = epoch + 1, state = 'ACTIVE', state_reason = '', takeovers = ?, takeover_head = ?,"
        f" {NO_MIGRATION}",
        incarnation,
        *count_takeover(stored.row, incarnation, stored.open_generation is not None),
    )
    requests.store(tx, request, "acquire", session_to_value(row))
    return row


def release(
    tx: Tx, name: SessionName, epoch: int, state: SessionState, reason: str, request: RequestKey | None
) -> SessionRow:
    """Catalog.release."""
    answer = requests.find(tx, request, "release")
    if answer is not None:
        return session_from_value(answer)
    stored = live(tx, name)
    check_release(stored.row, epoch, state, stored.open_generation)
    row = change(
        tx, name, f"owner = '', state = ?, state_reason = ?, takeovers = 0, {NO_MIGRATION}", state.value, reason
    )
    requests.store(tx, request, "release", session_to_value(row))
    return row


def release_quarantine(tx: Tx, name: SessionName, request: RequestKey | None) -> SessionRow:
    """Catalog.release_quarantine."""
    answer = requests.find(tx, request, "release_quarantine")
    if answer is not None:
        return session_from_value(answer)
    if live(tx, name).row.state is not SessionState.QUARANTINED:
        raise PreconditionError(f"{name} is not quarantined")
    row = change(tx, name, f"owner = '', state = 'ACTIVE', state_reason = '', takeovers = 0, {NO_MIGRATION}")
    requests.store(tx, request, "release_quarantine", session_to_value(row))
    return row


def note_numerics(tx: Tx, name: SessionName, epoch: int, numerics_ids: tuple[str, ...], exact: bool) -> SessionRow:
    """Catalog.note_numerics."""
    check_owned(live(tx, name).row, epoch)
    return change(tx, name, "numerics_ids = ?, exact = ?", dump(list(numerics_ids)), int(exact))


def change(tx: Tx, name: SessionName, assignments: str, *values: Any) -> SessionRow:
    """Assign columns of a session's row, beside `update_us`."""
    pending.settle(tx, name)
    tx.run(
        f"UPDATE sessions SET {assignments}, update_us = ? {_BY_NAME}", *values, tx.now_us, name.workflow, name.session
    )
    return load(tx, name).row


def _stored(tx: Tx, row: tuple[Any, ...]) -> StoredSession:
    (
        workflow,
        session,
        branch,
        state,
        state_reason,
        epoch,
        owner,
        head,
        grid_hash,
        tail,
        rewound_from,
        open_generation,
    ) = row[:12]
    parent, fork_position, seed, every_tokens, on_turn_end, labels, transient, exact, numerics_ids = row[12:21]
    expire_us, create_us, update_us, delete_us, purge_us, revision, keep_last, standbys = row[21:29]
    migration, migration_target, takeovers, takeover_head = row[29:]
    chain = HashChain(head, grid_hash, tail)
    waiting = pending.find(tx, SessionName(workflow, session)) if open_generation is not None else None
    if waiting is not None:
        chain, update_us = waiting.chain, waiting.update_us
    public = SessionRow(
        name=SessionName(workflow, session),
        branch=str(branch),
        state=SessionState(state),
        state_reason=state_reason,
        head=chain.position,
        head_hash=chain.head_hash(),
        epoch=epoch,
        owner=owner,
        parent=None if parent is None else SessionName(workflow, parent),
        fork_position=fork_position,
        seed=seed,
        policy=CheckpointPolicy(every_tokens, bool(on_turn_end), keep_last),
        labels=json.loads(labels),
        transient=bool(transient),
        exact=bool(exact),
        numerics_ids=tuple(json.loads(numerics_ids)),
        expire_us=expire_us,
        create_us=create_us,
        update_us=update_us,
        delete_us=delete_us,
        purge_us=purge_us,
        revision=revision,
        standbys=standbys,
        migration=migration,
        migration_target=migration_target,
        takeovers=takeovers,
        takeover_head=takeover_head,
    )
    return StoredSession(public, branch, chain, rewound_from, open_generation, waiting)
