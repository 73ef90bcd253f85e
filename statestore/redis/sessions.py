"""Sessions: names that point at branches, with an owner, an epoch and a head."""

import logging
from collections.abc import Iterable, Sequence
from secrets import token_hex
from typing import Any, Final

from forkpoint.errors import ForkpointError, LogCorruptError, NotFoundError, PreconditionError
from forkpoint.ids import SessionName
from forkpoint.statestore.records import CheckpointPolicy, NewSession, RequestKey, SessionRow, SessionState
from forkpoint.statestore.redis import workflows
from forkpoint.statestore.redis.access import Access, Head
from forkpoint.statestore.redis.functions import Answer, Argument, Refusal
from forkpoint.statestore.redis.hashes import (
    StoredSession,
    fields_of,
    flat_of,
    policy_fields,
    session_fields,
    session_of,
)
from forkpoint.statestore.redis.refusals import session_error
from forkpoint.statestore.rowjson import dump

log = logging.getLogger(__name__)

LIST_TOGETHER: Final = 16
"""Workflows that are asked for their sessions at once."""


async def change(
    access: Access,
    function: str,
    name: SessionName,
    request: RequestKey | None,
    *arguments: Argument,
    epoch: int = 0,
) -> tuple[SessionRow, bool]:
    """Call a function that answers with the session's row; the row, and whether it is an earlier answer."""
    try:
        answer = await access.functions.write(
            access.keys.workflow(name.workflow),
            function,
            access.request_in(name.workflow, request),
            name.session,
            *arguments,
        )
    except Refusal as refusal:
        raise session_error(refusal, name, epoch) from None
    stored = answered(name.workflow, answer)
    if not answer.replayed and access.heads.get(name) is None:
        access.heads.set(name, Head(stored.row.branch, stored.chain))
    return stored.row, answer.replayed


def answered(workflow: str, answer: Answer) -> StoredSession:
    """The session whose row a function answered with: of an earlier answer, the one that it was about."""
    session, flat = answer.value
    return session_of(SessionName(workflow, bytes(session).decode()), fields_of(flat))


async def create(access: Access, new: NewSession, request: RequestKey | None) -> tuple[SessionRow, bool]:
    """Catalog.create_session."""
    return await change(access, "create_session", new.name, request, access.root, *session_fields(new))


async def load(access: Access, name: SessionName) -> StoredSession:
    """The session, deleted or not. Raises NotFoundError."""
    base = access.keys.workflow(name.workflow)
    flat = await access.functions.look(base, "HGETALL", f"{base}:session:{name.session}")
    if not flat:
        raise NotFoundError(str(name))
    return session_of(name, fields_of(flat))


async def list_some(
    access: Access, workflow: str | None, after: SessionName | None, limit: int, show_deleted: bool
) -> list[SessionRow]:
    """Catalog.list_sessions."""
    if workflow is not None:
        if after is not None and after.workflow > workflow:
            return []
        return await _list_in(access, [workflow], after, limit, show_deleted)
    found: list[SessionRow] = []
    async for names in workflows.pages(access, f"[{after.workflow}" if after else "-"):
        for first in range(0, len(names), LIST_TOGETHER):
            together = names[first : first + LIST_TOGETHER]
            found += await _list_in(access, together, after, limit - len(found), show_deleted)
            if len(found) >= limit:
                return found[:limit]
    return found


async def _list_in(
    access: Access, names: Sequence[str], after: SessionName | None, limit: int, show_deleted: bool
) -> list[SessionRow]:
    index = "sessions" if show_deleted else "live"

    def start(workflow: str) -> str:
        return after.session if after is not None and after.workflow == workflow else ""

    replies = await access.functions.read_many(
        [(access.keys.workflow(name), "list_sessions", (index, start(name), limit)) for name in names]
    )
    return _listed(zip(names, replies, strict=True))[:limit]


def _listed(replies: Iterable[tuple[str, Sequence[Any]]]) -> list[SessionRow]:
    """The rows in replies of workflows. One that is damaged is left out: it must not hide the others, and whoever asks
    for it by name, and the check of the store, are told."""
    rows: list[SessionRow] = []
    for workflow, reply in replies:
        for session, flat in reply:
            name = SessionName(workflow, bytes(session).decode())
            try:
                rows.append(session_of(name, fields_of(flat)).row)
            except LogCorruptError as error:
                log.warning("left out of a list: %s", error)
    return rows


async def list_open_generations(access: Access) -> list[SessionRow]:
    """Catalog.list_open_generations. Workflows that have none any more are taken off the list on the way."""
    listed = await access.functions.look(access.keys.store, "SMEMBERS", f"{access.keys.store}:generating")
    entries = [bytes(entry).decode() for entry in listed]
    names = sorted({entry.partition(" ")[0] for entry in entries})
    replies = await access.functions.read_many([(access.keys.workflow(name), "list_open", ()) for name in names])
    by_workflow = dict(zip(names, replies, strict=True))
    for entry in entries:
        if not by_workflow[entry.partition(" ")[0]]:
            await _unlist(access, entry)
    return sorted(_listed(by_workflow.items()), key=lambda row: (-row.update_us, row.name))


async def list_generating(access: Access, workflow: str) -> str:
    """Put a workflow on the list under a new token, and return that."""
    token = token_hex(8)
    await access.functions.write(access.keys.store, "list_generating", None, f"{workflow} {token}")
    return token


async def _unlist(access: Access, entry: str) -> None:
    """Take an entry off the list, unless a generation was begun meanwhile. Best effort: it costs a look next time."""
    workflow, _, token = entry.partition(" ")
    try:
        await access.functions.write(access.keys.workflow(workflow), "unlist", None, token)
        await access.functions.write(access.keys.store, "unlist_generating", None, entry)
    except (Refusal, ForkpointError):
        return


async def update(
    access: Access,
    name: SessionName,
    revision: int | None,
    labels: dict[str, str] | None,
    policy: CheckpointPolicy | None,
    expire_us: int | None,
    standbys: int | None,
) -> SessionRow:
    """Catalog.update_session."""
    fields = flat_of(
        labels=None if labels is None else dump(labels),
        expire=expire_us,
        standbys=standbys,
        **({} if policy is None else policy_fields(policy)),
    )
    row, _ = await change(access, "update_session", name, None, "" if revision is None else revision, *fields)
    return row


async def delete(access: Access, name: SessionName, purge_us: int, request: RequestKey | None) -> SessionRow:
    """Catalog.delete_session."""
    return (await change(access, "delete_session", name, request, purge_us))[0]


async def undelete(access: Access, name: SessionName) -> SessionRow:
    """Catalog.undelete_session."""
    return (await change(access, "undelete_session", name, None))[0]


async def acquire(
    access: Access, name: SessionName, incarnation: str, expected_epoch: int, request: RequestKey | None
) -> SessionRow:
    """Catalog.acquire."""
    row, _ = await change(access, "acquire", name, request, expected_epoch, incarnation, epoch=expected_epoch)
    return row


async def release(
    access: Access, name: SessionName, epoch: int, state: SessionState, reason: str, request: RequestKey | None
) -> SessionRow:
    """Catalog.release."""
    if state is SessionState.DELETED:
        raise PreconditionError("a session is deleted by delete_session only")
    fields = flat_of(owner="", state=state.value, reason=reason, takeovers=0)
    return (await change(access, "release", name, request, epoch, *fields, epoch=epoch))[0]


async def release_quarantine(access: Access, name: SessionName, request: RequestKey | None) -> SessionRow:
    """Catalog.release_quarantine."""
    return (await change(access, "release_quarantine", name, request))[0]


async def note_numerics(
    access: Access, name: SessionName, epoch: int, numerics_ids: tuple[str, ...], exact: bool
) -> SessionRow:
    """Catalog.note_numerics."""
    fields = flat_of(numerics=dump(list(numerics_ids)), exact=int(exact))
    return (await change(access, "note_numerics", name, None, epoch, *fields, epoch=epoch))[0]
