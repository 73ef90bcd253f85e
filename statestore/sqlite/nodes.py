"""Incarnations and their leases."""

from forkpoint.errors import AlreadyExistsError, NotFoundError
from forkpoint.statestore.records import NodeRow
from forkpoint.statestore.sqlite.tx import Tx


def register(tx: Tx, node: NodeRow) -> None:
    """Catalog.register_node."""
    if tx.one("SELECT 1 FROM nodes WHERE incarnation = ?", node.incarnation):
        raise AlreadyExistsError(f"nodes/{node.incarnation}")
    tx.run(
        "INSERT INTO nodes (incarnation, node, address, numerics_id, counter, lock_path) VALUES (?, ?, ?, ?, 1, ?)",
        node.incarnation,
        node.node,
        node.address,
        node.numerics_id,
        node.lock_path,
    )


def renew(tx: Tx, incarnation: str) -> int:
    """Catalog.renew_lease."""
    row = tx.one("UPDATE nodes SET counter = counter + 1 WHERE incarnation = ? RETURNING counter", incarnation)
    if row is None:
        raise NotFoundError(f"nodes/{incarnation}")
    return int(row[0])


def remove(tx: Tx, incarnation: str) -> None:
    """Catalog.remove_node."""
    tx.run("DELETE FROM nodes WHERE incarnation = ?", incarnation)


def list_all(tx: Tx) -> list[NodeRow]:
    """Catalog.list_nodes."""
    columns = "incarnation, node, address, numerics_id, counter, lock_path"
    return [NodeRow(*row) for row in tx.rows(f"SELECT {columns} FROM nodes ORDER BY seq")]
