"""Workflows: rows in slots of their own, and one index of them all."""

from collections.abc import AsyncIterator
from hashlib import blake2b
from typing import Final

from forkpoint.errors import NotFoundError
from forkpoint.statestore.records import RequestKey, WorkflowRow
from forkpoint.statestore.redis.access import Access
from forkpoint.statestore.redis.functions import Refusal
from forkpoint.statestore.redis.hashes import fields_of, flat_of, workflow_of
from forkpoint.statestore.redis.refusals import workflow_error
from forkpoint.statestore.rowjson import dump

PAGE: Final = 256
"""Workflows that are looked at together."""


def first_branch(workflow: str) -> int:
    """The number that a workflow's branches are counted from: 21 bits of its name, then 32 for its branches, so that a
    log record at another workflow's place is found by its branch. Below 2^53, which Lua counts exactly."""
    return (int.from_bytes(blake2b(workflow.encode(), digest_size=4).digest(), "little") >> 11) << 32


async def create(access: Access, row: WorkflowRow, request: RequestKey | None) -> WorkflowRow:
    """Catalog.create_workflow. It is listed before it is there: an entry without a row is none."""
    name = row.workflow
    request = access.request_in(name, request)
    await access.functions.write(access.keys.store, "list_workflow", None, name)
    try:
        answer = await access.functions.write(
            access.keys.workflow(name), "create_workflow", request, dump(row.labels), first_branch(name), row.standbys
        )
    except Refusal as refusal:
        raise workflow_error(refusal, name) from None
    return workflow_of(name, fields_of(answer.value))


async def get(access: Access, workflow: str) -> WorkflowRow:
    """Catalog.get_workflow."""
    (row,) = await load(access, [workflow])
    if row is None or row.delete_us is not None:
        raise NotFoundError(f"workflows/{workflow}")
    return row


async def list_some(access: Access, after: str, limit: int) -> list[WorkflowRow]:
    """Catalog.list_workflows."""
    found: list[WorkflowRow] = []
    async for names in pages(access, f"({after}" if after else "-"):
        found += [row for row in await load(access, names) if row is not None and row.delete_us is None]
        if len(found) >= limit:
            break
    return found[:limit]


async def update(
    access: Access, workflow: str, labels: dict[str, str] | None, revision: int | None, standbys: int | None
) -> WorkflowRow:
    """Catalog.update_workflow."""
    given = "" if revision is None else revision
    fields = flat_of(labels=None if labels is None else dump(labels), standbys=standbys)
    try:
        answer = await access.functions.write(access.keys.workflow(workflow), "update_workflow", None, given, *fields)
    except Refusal as refusal:
        raise workflow_error(refusal, workflow) from None
    return workflow_of(workflow, fields_of(answer.value))


async def delete(access: Access, workflow: str) -> None:
    """Catalog.delete_workflow."""
    try:
        await access.functions.write(access.keys.workflow(workflow), "delete_workflow", None)
    except Refusal as refusal:
        raise workflow_error(refusal, workflow) from None


async def load(access: Access, workflows: list[str]) -> list[WorkflowRow | None]:
    """Rows, also of deleted workflows; None where there is none."""
    bases = [access.keys.workflow(name) for name in workflows]
    replies = await access.functions.look_many([(base, ("HGETALL", f"{base}:workflow")) for base in bases])
    rows: list[WorkflowRow | None] = []
    for name, reply in zip(workflows, replies, strict=True):
        rows.append(workflow_of(name, fields_of(reply)) if reply else None)
    return rows


async def pages(access: Access, start: str = "-") -> AsyncIterator[list[str]]:
    """Names of all workflows that were ever created, ascending. `start`: as ZRANGE BYLEX takes it."""
    index = f"{access.keys.store}:workflows"
    while True:
        found = await access.functions.look(access.keys.store, "ZRANGE", index, start, "+", "BYLEX", "LIMIT", 0, PAGE)
        names = [bytes(name).decode() for name in found]
        if names:
            yield names
        if len(names) < PAGE:
            return
        start = f"({names[-1]}"
