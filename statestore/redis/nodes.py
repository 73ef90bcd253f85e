"""Incarnations and their leases."""

from forkpoint.errors import AlreadyExistsError, NotFoundError
from forkpoint.statestore.records import NodeRow, NodeStatus
from forkpoint.statestore.redis.access import Access
from forkpoint.statestore.redis.functions import Refusal
from forkpoint.statestore.redis.hashes import fields_of, flat_of, node_of
from forkpoint.statestore.rowjson import status_to_json


async def register(access: Access, node: NodeRow) -> None:
    """Catalog.register_node."""
    fields = flat_of(
        node=node.node,
        address=node.address,
        numerics=node.numerics_id,
        lock=node.lock_path,
        status=status_to_json(node.status),
    )
    try:
        await access.functions.write(access.keys.store, "register_node", None, node.incarnation, *fields)
    except Refusal:
        raise AlreadyExistsError(f"nodes/{node.incarnation}") from None


async def renew(access: Access, incarnation: str, status: NodeStatus | None) -> int:
    """Catalog.renew_lease."""
    told = "" if status is None else status_to_json(status)
    try:
        answer = await access.functions.write(access.keys.store, "renew_lease", None, incarnation, told)
    except Refusal:
        raise NotFoundError(f"nodes/{incarnation}") from None
    return int(answer.value[0])


async def remove(access: Access, incarnation: str) -> None:
    """Catalog.remove_node."""
    await access.functions.write(access.keys.store, "remove_node", None, incarnation)


async def list_all(access: Access) -> list[NodeRow]:
    """Catalog.list_nodes."""
    found = await access.functions.read(access.keys.store, "list_nodes")
    return [node_of(bytes(incarnation).decode(), fields_of(fields)) for incarnation, fields in found]
