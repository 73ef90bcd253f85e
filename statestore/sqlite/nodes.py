"""Incarnations and their leases."""

from typing import Any

from forkpoint.errors import AlreadyExistsError, NotFoundError
from forkpoint.statestore.records import NodeRow, NodeStatus
from forkpoint.statestore.rowjson import status_from_json, status_to_json
from forkpoint.statestore.sqlite.tx import Tx


def register(tx: Tx, node: NodeRow) -> None:
    """Catalog.register_node."""
    if tx.one("SELECT 1 FROM nodes WHERE incarnation = ?", node.incarnation):
        raise AlreadyExistsError(f"nodes/{node.incarnation}")
    tx.run(
        "INSERT INTO nodes (incarnation, node, address, numerics_id, counter, lock_path, status)"
        " VALUES (?, ?, ?, ?, 1, ?, ?)",
        node.incarnation,
        node.node,
        node.address,
        node.numerics_id,
        node.lock_path,
        status_to_json(node.status),
    )


def renew(tx: Tx, incarnation: str, status: NodeStatus | None) -> int:
    """Catalog.renew_lease."""
    row = tx.one(
        "UPDATE nodes SET counter = counter + 1, status = coalesce(?, status) WHERE incarnation = ? RETURNING counter",
        None if status is None else status_to_json(status),
        incarnation,
    )
    if row is None:
        raise NotFoundError(f"nodes/{incarnation}")
    return int(row[0])


def remove(tx: Tx, incarnation: str) -> None:
    """Catalog.remove_node."""
    tx.run("DELETE FROM nodes WHERE incarnation = ?", incarnation)


def list_all(tx: Tx) -> list[NodeRow]:
    """Catalog.list_nodes."""
    columns = "incarnation, node, address, numerics_id, counter, lock_path, status"
    return [_row(row) for row in tx.rows(f"SELECT {columns} FROM nodes ORDER BY seq")]


def _row(row: tuple[Any, ...]) -> NodeRow:
    incarnation, node, address, numerics_id, counter, lock_path, status = row
    return NodeRow(incarnation, node, address, numerics_id, counter, lock_path, status_from_json(status))
