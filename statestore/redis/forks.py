"""Forks and rewinds: new branches that share their past."""

from forkpoint.errors import NotFoundError, PositionBeyondHeadError, StoreUnavailableError
from forkpoint.ids import SessionName
from forkpoint.statestore.calls import ForkOutcome, ForkSessions
from forkpoint.statestore.records import RequestKey, SessionRow
from forkpoint.statestore.redis import log
from forkpoint.statestore.redis.access import TRIES, Access, Head
from forkpoint.statestore.redis.functions import Answer, Argument, Refusal
from forkpoint.statestore.redis.hashes import chain_bytes, fields_of, session_fields, session_of
from forkpoint.statestore.redis.refusals import session_error
from forkpoint.statestore.redis.sessions import answered
from forkpoint.statestore.rules import check_child_workflows, check_position


async def fork(access: Access, call: ForkSessions) -> ForkOutcome:
    """Catalog.fork. One round trip at the head."""
    check_child_workflows(call)
    children: list[Argument] = [len(call.children)]
    for child in call.children:
        children += [child.name.session, *session_fields(child)]
    answer = await _branch_off(access, "fork", call.parent, 0, call.position, call.request, children)
    position, made = answer.value
    rows = tuple(
        session_of(SessionName(call.parent.workflow, bytes(session).decode()), fields_of(flat)).row
        for session, flat in made
    )
    return ForkOutcome(rows, int(position), answer.replayed)


async def rewind(
    access: Access, name: SessionName, epoch: int, position: int, request: RequestKey | None
) -> tuple[SessionRow, bool]:
    """Catalog.rewind."""
    answer = await _branch_off(access, "rewind", name, epoch, position, request, [])
    stored = answered(name.workflow, answer)
    if not answer.replayed:
        access.heads.set(name, Head(stored.row.branch, stored.chain))
    return stored.row, answer.replayed


async def _branch_off(
    access: Access,
    function: str,
    name: SessionName,
    epoch: int,
    position: int | None,
    request: RequestKey | None,
    more: list[Argument],
) -> Answer:
    """Call fork or rewind. Below the head the chain at the position is read first; the function makes sure that it
    was read on the session's branch, where what lies below the head never changes."""
    if position is not None:
        check_position(name, position, max(0, position))
    request = access.request_in(name.workflow, request)
    known = access.heads.get(name)
    look = position is not None and (known is None or known.chain.position != position)
    for _ in range(TRIES):
        at = await _at(access, name, position) if look and position is not None else Head("", access.empty)
        arguments: list[Argument] = [] if function == "fork" else [epoch]
        arguments += ["" if position is None else position, at.branch, chain_bytes(at.chain), *more]
        try:
            return await access.functions.write(
                access.keys.workflow(name.workflow), function, request, name.session, *arguments
            )
        except Refusal as refusal:
            if refusal.status != "MOVED":
                raise session_error(refusal, name, epoch) from None
            look = True
    raise StoreUnavailableError(access.functions.connection.shown, f"{name}: others wrote first, {TRIES} times")


async def _at(access: Access, name: SessionName, position: int) -> Head:
    """The chain at a position and the branch that it was read on; of no branch when the function will refuse, which
    it does only after it has looked for an earlier answer."""
    try:
        fetched, chain = await log.position_chain(access, name, position)
    except (NotFoundError, PositionBeyondHeadError):
        return Head("", access.empty)
    return Head(fetched.branch, chain)
