"""Migrations: an owner's word that its session may go to another node, and the cut-over that takes it at its word."""

from forkpoint.errors import PositionConflictError, StoreUnavailableError
from forkpoint.ids import SessionName
from forkpoint.statestore.records import SessionRow
from forkpoint.statestore.redis.access import TRIES, Access, Head
from forkpoint.statestore.redis.acknowledged import note
from forkpoint.statestore.redis.functions import Refusal
from forkpoint.statestore.redis.hashes import chain_bytes
from forkpoint.statestore.redis.refusals import session_error
from forkpoint.statestore.redis.sessions import answered, change
from forkpoint.statestore.rules import check_migration


async def begin(access: Access, name: SessionName, epoch: int, migration: str, target: str) -> SessionRow:
    """Catalog.begin_migration."""
    check_migration(migration, target)
    return (await change(access, "begin_migration", name, None, epoch, migration, target, epoch=epoch))[0]


async def end(access: Access, name: SessionName, epoch: int, migration: str) -> SessionRow:
    """Catalog.end_migration."""
    return (await change(access, "end_migration", name, None, epoch, migration, epoch=epoch))[0]


async def cut_over(
    access: Access, name: SessionName, epoch: int, migration: str, incarnation: str, head: int, head_hash: bytes
) -> SessionRow:
    """Catalog.cut_over. One round trip when this process knows the head, else two."""
    for _ in range(TRIES):
        known = access.heads.get(name) or Head("", access.empty)
        try:
            answer = await access.functions.write(
                access.keys.workflow(name.workflow),
                "cut_over",
                None,
                name.session,
                epoch,
                migration,
                incarnation,
                head,
                head_hash,
                known.branch,
                known.chain.position,
                chain_bytes(known.chain),
                known.chain.head_hash(),
            )
        except Refusal as refusal:
            if refusal.status == "MOVED":
                await note(access, name, refusal.details)
                continue
            if refusal.status == "UNEXPECTED":
                found = known.chain
                raise PositionConflictError(str(name), head, found.position, found.head_hash()) from None
            raise session_error(refusal, name, epoch) from None
        stored = answered(name.workflow, answer)
        access.heads.set(name, Head(stored.row.branch, stored.chain))
        return stored.row
    raise StoreUnavailableError(access.functions.connection.shown, f"{name}: others wrote first, {TRIES} times")
