"""Checkpoints of sessions. A row lies in its workflow's slot, the manifest that it names in the store's."""

from collections.abc import Sequence
from secrets import token_hex
from typing import Any

from forkpoint.errors import (
    AlreadyExistsError,
    NotFoundError,
    PreconditionError,
    StoreFullError,
    StoreUnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.statestore.records import CheckpointRow, RequestKey
from forkpoint.statestore.redis import log, manifests, requests
from forkpoint.statestore.redis.access import TRIES, Access
from forkpoint.statestore.redis.functions import Refusal
from forkpoint.statestore.redis.hashes import checkpoint_of, flat_of, manifest_key_of
from forkpoint.statestore.redis.refusals import session_error
from forkpoint.statestore.rules import check_checkpoint, check_epoch


async def put(
    access: Access,
    row: CheckpointRow,
    manifest: bytes,
    epoch: int,
    request: RequestKey | None,
    replace_manifest: bool,
    digests: Sequence[str],
    since: int,
) -> CheckpointRow:
    """Catalog.put_checkpoint: what can be refused is refused first, then the manifest and a reference to it are put,
    then the row, which checks all once more. A reference whose row did not come about is taken back; one that a crash
    leaves keeps a manifest that nothing names."""
    name = row.session
    request = access.request_in(name.workflow, request)
    answer = None if request is None else await requests.find(access, request, "put_checkpoint")
    if answer is not None:
        return checkpoint_of(name.workflow, answer.value)
    for _ in range(TRIES):
        branch = await _check(access, row, epoch)
        new = manifests.NewManifest(row.manifest_key, manifest, replace_manifest)
        reference = await manifests.put(access, new, _reference(row), digests, since)
        try:
            return await _put_row(access, row, epoch, request, branch, reference)
        except Refusal as refusal:
            await manifests.drop_references(access, [(row.manifest_key, reference)])
            if refusal.status == "CHECKPOINT_EXISTS":
                raise AlreadyExistsError(f"{name}/checkpoints/{row.checkpoint}") from None
            if refusal.status not in ("MOVED", "CANCELLED"):
                raise session_error(refusal, name, epoch) from None
    raise StoreUnavailableError(access.functions.connection.shown, f"{name}: it was rewound {TRIES} times meanwhile")


async def _check(access: Access, row: CheckpointRow, epoch: int) -> str:
    """Refuse what can be refused; returns the branch on which the row's hash is right."""
    name = row.session
    fetched = await log.fetch(access, name, row.grid_position - 1, 1 if row.grid_position > 0 else 0)
    check_epoch(name, epoch, fetched.epoch)
    check_checkpoint(row, fetched.chain.position)
    if log.chain_of(access, name, fetched, row.grid_position).grid_hash != row.chain_hash:
        raise PreconditionError(f"{name}: the checkpoint's chain hash at {row.grid_position} is not the log's")
    base = access.keys.workflow(name.workflow)
    if await access.functions.look(base, "EXISTS", f"{base}:checkpoint:{name.session}:{row.checkpoint}"):
        raise AlreadyExistsError(f"{name}/checkpoints/{row.checkpoint}")
    return fetched.branch


async def _put_row(
    access: Access, row: CheckpointRow, epoch: int, request: RequestKey | None, branch: str, reference: str
) -> CheckpointRow:
    name = row.session
    fields = flat_of(
        chain=row.chain_hash,
        numerics=row.numerics_id,
        automatic=int(row.automatic),
        expire=row.expire_us,
    )
    answer = await access.functions.write(
        access.keys.workflow(name.workflow),
        "put_checkpoint",
        request,
        name.session,
        epoch,
        branch,
        row.checkpoint,
        row.position,
        row.grid_position,
        reference,
        *fields,
    )
    return checkpoint_of(name.workflow, answer.value)


def _reference(row: CheckpointRow) -> str:
    """Names the row for whoever looks, and this very put."""
    return f"{row.session.workflow} {row.session.session} {row.checkpoint} {token_hex(8)}"


async def list_own(access: Access, name: SessionName) -> list[CheckpointRow]:
    """Catalog.list_checkpoints."""
    try:
        (found,) = await access.functions.ask(access.keys.workflow(name.workflow), "list_checkpoints", name.session)
    except Refusal as refusal:
        raise session_error(refusal, name) from None
    rows = [row for row, known in _candidates(name.workflow, found) if known or await _on_chain(access, name, row)]
    return sorted(rows, key=lambda row: (row.position, row.create_us, row.checkpoint))


async def nearest(access: Access, name: SessionName, position: int, numerics_id: str | None) -> CheckpointRow | None:
    """Catalog.nearest_checkpoint."""
    base = access.keys.workflow(name.workflow)
    try:
        (found,) = await access.functions.ask(base, "nearest_checkpoint", name.session, position, numerics_id or "")
    except Refusal as refusal:
        raise session_error(refusal, name) from None
    best: CheckpointRow | None = None
    for row, known in _candidates(name.workflow, found):
        higher = best is None or row.grid_position > best.grid_position
        if higher and (known or await _on_chain(access, name, row, deleted=True)):
            best = row
    return best


def _candidates(workflow: str, found: Sequence[Any]) -> list[tuple[CheckpointRow, bool]]:
    """Rows and whether they are known to lie on the chain; the makers as they came, each one's highest first."""
    rows = [(checkpoint_of(workflow, candidate), candidate[3] == b"1") for candidate in found]
    makers = {row.session: place for place, (row, _) in reversed(list(enumerate(rows)))}

    def order(candidate: tuple[CheckpointRow, bool]) -> tuple[int, int, int, int, str]:
        row = candidate[0]
        return makers[row.session], -row.grid_position, row.position, row.create_us, row.checkpoint

    return sorted(rows, key=order)


async def _on_chain(access: Access, name: SessionName, row: CheckpointRow, deleted: bool = False) -> bool:
    _, chain = await log.position_chain(access, name, row.grid_position, deleted)
    return chain.grid_hash == row.chain_hash


async def get(access: Access, name: SessionName, checkpoint: str) -> tuple[CheckpointRow, bytes]:
    """Catalog.get_checkpoint."""
    try:
        found = await access.functions.ask(
            access.keys.workflow(name.workflow), "get_checkpoint", name.session, checkpoint
        )
    except Refusal as refusal:
        raise session_error(refusal, name) from None
    if not found[2]:
        raise NotFoundError(f"{name}/checkpoints/{checkpoint}")
    row = checkpoint_of(name.workflow, found)
    manifest = await manifests.get(access, row.manifest_key)
    if manifest is None:
        raise NotFoundError(f"{name}/checkpoints/{checkpoint}", "has lost its manifest")
    return row, manifest


async def delete(access: Access, name: SessionName, checkpoint: str, request: RequestKey | None) -> CheckpointRow:
    """Catalog.delete_checkpoint."""
    try:
        answer = await access.functions.write(
            access.keys.workflow(name.workflow),
            "delete_checkpoint",
            access.request_in(name.workflow, request),
            name.session,
            checkpoint,
        )
    except Refusal as refusal:
        if refusal.status == "NO_CHECKPOINT":
            raise NotFoundError(f"{name}/checkpoints/{checkpoint}") from None
        raise session_error(refusal, name) from None
    await let_go(access, name.workflow)
    return checkpoint_of(name.workflow, answer.value)


async def scan(access: Access, workflow: str, after: tuple[str, str] | None, limit: int) -> list[CheckpointRow]:
    """Catalog.scan_checkpoints."""
    start = "" if after is None else " ".join(after)
    found = await access.functions.read(access.keys.workflow(workflow), "scan_checkpoints", start, limit)
    return [checkpoint_of(workflow, candidate) for candidate in found]


async def lineage(access: Access, workflow: str) -> int:
    """Catalog.lineage: branches are numbered as they come, and every session made, forked or rewound takes one."""
    return int(await access.functions.read(access.keys.workflow(workflow), "lineage"))


async def drop(access: Access, workflow: str, seen: int, rows: Sequence[tuple[str, str]]) -> bool:
    """Catalog.drop_checkpoints."""
    base = access.keys.workflow(workflow)
    names = [part for row in rows for part in row]
    try:
        await access.functions.write(base, "drop_checkpoints", None, seen, len(rows), *names)
    except Refusal:
        return False
    await let_go(access, workflow)
    return True


async def cancel_reference(access: Access, key: str, reference: str) -> bool:
    """Take a reference that no checkpoint holds from the manifest under `key`. A put that is under way with it starts
    anew. False when a checkpoint holds it now."""
    workflow, session, checkpoint, _ = reference.split(" ")
    base = access.keys.workflow(workflow)
    try:
        await access.functions.write(base, "cancel_reference", None, session, checkpoint, reference)
    except Refusal:
        return False
    await manifests.drop_references(access, [(manifest_key_of(key), reference)])
    return True


async def let_go(access: Access, workflow: str) -> None:
    """Take the references of removed rows. What fails here is left to the next removal in the workflow."""
    base = access.keys.workflow(workflow)
    try:
        found = await access.functions.look(base, "SMEMBERS", f"{base}:unreferenced")
        gone = [bytes(member).decode() for member in found]
        pairs = [member.split("\n", 1) for member in gone]
        await manifests.drop_references(access, [(manifest_key_of(key), reference) for key, reference in pairs])
        await access.functions.write(base, "let_go", None, len(gone), *gone)
    except (StoreUnavailableError, StoreFullError):
        return
