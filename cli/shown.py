"""Resources of the API as plain values, for tables and JSON. Bytes are hex, times RFC 3339, names full."""

from collections.abc import Iterable, Mapping
from typing import Any

from forkpoint.cli.names import short


def enum_name(message: Any, field: str) -> str:
    """The name of an enum field's value, such as `ACTIVE`."""
    value = message.DESCRIPTOR.fields_by_name[field].enum_type.values_by_number.get(getattr(message, field))
    return value.name if value is not None else str(getattr(message, field))


def time_text(message: Any, field: str) -> str:
    """A timestamp as RFC 3339, "" when it is not set."""
    return str(getattr(message, field).ToJsonString()) if message.HasField(field) else ""


def session_dict(session: Any) -> dict[str, Any]:
    """A Session."""
    policy = session.checkpoint_policy
    return {
        "name": session.name,
        "state": enum_name(session, "state"),
        "state_reason": session.state_reason,
        "head": session.head,
        "head_hash": session.head_hash.hex(),
        "consumed": session.consumed,
        "prompt_tokens": session.usage.prompt_tokens,
        "generated_tokens": session.usage.generated_tokens,
        "epoch": session.epoch,
        "node": session.node,
        "parent": session.parent,
        "fork_position": session.fork_position,
        "seed": session.seed,
        "checkpoint_every_tokens": policy.every_tokens if policy.HasField("every_tokens") else None,
        "checkpoint_on_turn_end": policy.on_turn_end,
        "recovery_time_estimate_s": session.recovery_time_estimate.ToMilliseconds() / 1000,
        "exact": session.exact,
        "numerics_ids": list(session.numerics_ids),
        "model_digest": session.model.model_digest.hex(),
        "labels": dict(session.labels),
        "transient": session.transient,
        "standbys": session.standbys,
        "create_time": time_text(session, "create_time"),
        "update_time": time_text(session, "update_time"),
        "delete_time": time_text(session, "delete_time"),
        "purge_time": time_text(session, "purge_time"),
        "etag": session.etag,
    }


SESSION_COLUMNS = ("session", "state", "tokens", "generated", "parent", "at", "node", "epoch")


def session_row(session: Any) -> tuple[object, ...]:
    """A Session in a table, under SESSION_COLUMNS."""
    return (
        short(session.name),
        enum_name(session, "state"),
        session.head,
        session.usage.generated_tokens,
        short(session.parent),
        session.fork_position if session.parent else "",
        session.node.removeprefix("nodes/"),
        session.epoch,
    )


def checkpoint_dict(checkpoint: Any, with_parts: bool) -> dict[str, Any]:
    """A Checkpoint."""
    shown: dict[str, Any] = {
        "name": checkpoint.name,
        "position": checkpoint.position,
        "grid_position": checkpoint.grid_position,
        "chain_hash": checkpoint.chain_hash.hex(),
        "numerics_ids": list(checkpoint.numerics_ids),
        "exact": checkpoint.exact,
        "automatic": checkpoint.automatic,
        "create_time": time_text(checkpoint, "create_time"),
        "expire_time": time_text(checkpoint, "expire_time"),
        "parts": len(checkpoint.parts),
        "bytes_total": checkpoint.bytes_total,
        "bytes_stored": checkpoint.bytes_stored,
        "bytes_shared": checkpoint.bytes_shared,
        "durability": enum_name(checkpoint, "durability"),
    }
    if with_parts:
        shown["parts"] = [{"name": p.name, "bytes": p.bytes, "blake3": p.blake3} for p in checkpoint.parts]
    return shown


def workflow_dict(workflow: Any) -> dict[str, Any]:
    """A Workflow."""
    return {
        "name": workflow.name,
        "labels": dict(workflow.labels),
        "standbys": workflow.standbys,
        "create_time": time_text(workflow, "create_time"),
        "update_time": time_text(workflow, "update_time"),
        "etag": workflow.etag,
    }


def node_dict(node: Any) -> dict[str, Any]:
    """A Node."""
    return {
        "name": node.name,
        "incarnation": node.incarnation,
        "state": enum_name(node, "state"),
        "address": node.address,
        "numerics_id": node.numerics_id,
        "sessions": node.sessions,
        "waiting": node.waiting,
        "following": node.following,
        "slots_total": node.slots_total,
        "slots_free": node.slots_free,
        "pages_total": node.pages_total,
        "pages_free": node.pages_free,
        "lease_counter": node.lease_counter,
    }


NODE_COLUMNS = ("node", "state", "address", "sessions", "waiting", "following", "slots free", "pages free", "numerics")


def node_row(node: Any) -> tuple[object, ...]:
    """A Node in a table, under NODE_COLUMNS."""
    return (
        node.name.removeprefix("nodes/"),
        enum_name(node, "state"),
        node.address,
        node.sessions,
        node.waiting,
        node.following,
        f"{node.slots_free:,} of {node.slots_total:,}",
        f"{node.pages_free:,} of {node.pages_total:,}",
        node.numerics_id[:12],
    )


def _place(session: Any, nodes: Mapping[str, Any]) -> str:
    """Where a session is, for its line of the tree. A node that serves as it should goes without saying so."""
    if not session.node:
        return ", on no node"
    node = nodes.get(session.node)
    state = "unknown" if node is None else enum_name(node, "state").lower()
    return f", on {session.node.removeprefix('nodes/')}" + ("" if state == "serving" else f" ({state})")


def tree_lines(sessions: Iterable[Any], nodes: Mapping[str, Any] | None = None) -> list[str]:
    """The fork tree as indented lines, children under their parents, parents that are hidden left out. With `nodes` (by
    name) each line says which of them has the session."""
    by_name = {session.name: session for session in sessions}
    children: dict[str, list[Any]] = {}
    for session in by_name.values():
        children.setdefault(session.parent if session.parent in by_name else "", []).append(session)
    lines: list[str] = []

    def walk(session: Any, prefix: str, joint: str, below: str) -> None:
        origin = f", from {session.fork_position:,}" if session.parent else ""
        state = enum_name(session, "state")
        place = "" if nodes is None else _place(session, nodes)
        lines.append(f"{prefix}{joint}{short(session.name)}  {state}, {session.head:,} tokens{origin}{place}")
        own = children.get(session.name, [])
        for index, child in enumerate(own):
            last = index == len(own) - 1
            walk(child, prefix + below, "└── " if last else "├── ", "    " if last else "│   ")

    for root in children.get("", []):
        walk(root, "", "", "")
    return lines
