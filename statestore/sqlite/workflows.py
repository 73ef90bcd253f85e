"""Workflows."""

import json
from typing import Any, Final

from forkpoint.errors import AlreadyExistsError, EtagMismatchError, NotFoundError, PreconditionError
from forkpoint.statestore.records import RequestKey, WorkflowRow
from forkpoint.statestore.rowjson import dump, workflow_from_value, workflow_to_value
from forkpoint.statestore.sqlite import requests
from forkpoint.statestore.sqlite.tx import Tx

_COLUMNS: Final = "workflow, labels, create_us, update_us, delete_us, revision, standbys"


def create(tx: Tx, row: WorkflowRow, request: RequestKey | None) -> WorkflowRow:
    """Catalog.create_workflow."""
    answer = requests.find(tx, request, "create_workflow")
    if answer is not None:
        return workflow_from_value(answer)
    if tx.one("SELECT 1 FROM workflows WHERE workflow = ?", row.workflow):
        raise AlreadyExistsError(f"workflows/{row.workflow}")
    tx.run(
        f"INSERT INTO workflows ({_COLUMNS}) VALUES (?, ?, ?, ?, NULL, 1, ?)",
        row.workflow,
        dump(row.labels),
        tx.now_us,
        tx.now_us,
        row.standbys,
    )
    created = get(tx, row.workflow)
    requests.store(tx, request, "create_workflow", workflow_to_value(created))
    return created


def get(tx: Tx, workflow: str) -> WorkflowRow:
    """Catalog.get_workflow."""
    row = tx.one(f"SELECT {_COLUMNS} FROM workflows WHERE workflow = ? AND delete_us IS NULL", workflow)
    if row is None:
        raise NotFoundError(f"workflows/{workflow}")
    return _row(row)


def list_some(tx: Tx, after: str, limit: int) -> list[WorkflowRow]:
    """Catalog.list_workflows."""
    sql = f"SELECT {_COLUMNS} FROM workflows WHERE workflow > ? AND delete_us IS NULL ORDER BY workflow LIMIT ?"
    return [_row(row) for row in tx.rows(sql, after, limit)]


def update(
    tx: Tx, workflow: str, labels: dict[str, str] | None, revision: int | None, standbys: int | None
) -> WorkflowRow:
    """Catalog.update_workflow."""
    current = get(tx, workflow)
    if revision is not None and revision != current.revision:
        raise EtagMismatchError(f"workflows/{workflow}", str(current.revision))
    tx.run(
        "UPDATE workflows SET labels = ?, standbys = ?, update_us = ?, revision = revision + 1 WHERE workflow = ?",
        dump(current.labels if labels is None else labels),
        current.standbys if standbys is None else standbys,
        tx.now_us,
        workflow,
    )
    return get(tx, workflow)


def delete(tx: Tx, workflow: str) -> None:
    """Catalog.delete_workflow."""
    get(tx, workflow)
    row = tx.one("SELECT session FROM sessions WHERE workflow = ? AND state != 'DELETED' LIMIT 1", workflow)
    if row is not None:
        raise PreconditionError(f"workflows/{workflow} still has sessions, {row[0]} among them")
    tx.run(
        "UPDATE workflows SET delete_us = ?, update_us = ?, revision = revision + 1 WHERE workflow = ?",
        tx.now_us,
        tx.now_us,
        workflow,
    )


def _row(row: tuple[Any, ...]) -> WorkflowRow:
    workflow, labels, create_us, update_us, delete_us, revision, standbys = row
    return WorkflowRow(workflow, json.loads(labels), create_us, update_us, delete_us, revision, standbys)
