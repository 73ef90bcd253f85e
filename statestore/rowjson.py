"""Rows as JSON text: parameters of a generation, and the stored answers of request ids. Never for token bytes."""

import json
from dataclasses import asdict, fields
from typing import Any, Final

from forkpoint.ids import SessionName
from forkpoint.statestore.records import (
    CheckpointPolicy,
    CheckpointRow,
    GenerationParams,
    NodeStatus,
    SamplingParams,
    SessionRow,
    SessionState,
    WorkflowRow,
)

_STATUS_FIELDS: Final = frozenset(field.name for field in fields(NodeStatus))


def dump(value: Any) -> str:
    """Compact JSON with sorted keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def params_to_json(params: GenerationParams) -> str:
    """A generation's parameters; bytes become hex. Floats survive exactly (repr is shortest round-trip)."""
    sampling = params.sampling
    return dump(
        {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": sampling.seed,
            "max_tokens": params.max_tokens,
            "stop_text": [text.hex() for text in params.stop_text],
            "stop_ids": list(params.stop_ids),
            "logprobs": params.logprobs,
        }
    )


def params_from_json(text: str) -> GenerationParams:
    """The inverse of params_to_json."""
    value = json.loads(text)
    sampling = SamplingParams(value["temperature"], value["top_k"], value["top_p"], value["min_p"], value["seed"])
    stops = tuple(bytes.fromhex(stop) for stop in value["stop_text"])
    return GenerationParams(sampling, value["max_tokens"], stops, tuple(value["stop_ids"]), value["logprobs"])


def status_to_json(status: NodeStatus) -> str:
    """What a node tells about itself."""
    return dump(asdict(status))


def status_from_json(text: str | bytes) -> NodeStatus:
    """The inverse of status_to_json. What a node of another version tells beyond what is known here is left out."""
    return NodeStatus(**{name: value for name, value in json.loads(text).items() if name in _STATUS_FIELDS})


def session_to_value(row: SessionRow) -> dict[str, Any]:
    """A session as a JSON object."""
    return {
        "name": str(row.name),
        "branch": row.branch,
        "state": row.state.value,
        "state_reason": row.state_reason,
        "head": row.head,
        "head_hash": row.head_hash.hex(),
        "epoch": row.epoch,
        "owner": row.owner,
        "parent": None if row.parent is None else str(row.parent),
        "fork_position": row.fork_position,
        "seed": row.seed,
        "policy": [row.policy.every_tokens, row.policy.on_turn_end, row.policy.keep_last],
        "labels": row.labels,
        "transient": row.transient,
        "exact": row.exact,
        "numerics_ids": list(row.numerics_ids),
        "expire_us": row.expire_us,
        "create_us": row.create_us,
        "update_us": row.update_us,
        "delete_us": row.delete_us,
        "purge_us": row.purge_us,
        "revision": row.revision,
        "standbys": row.standbys,
        "migration": row.migration,
        "migration_target": row.migration_target,
        "takeovers": row.takeovers,
        "takeover_head": row.takeover_head,
    }


def session_from_value(value: dict[str, Any]) -> SessionRow:
    """The inverse of session_to_value."""
    return SessionRow(
        **{
            **value,
            "name": SessionName.parse(value["name"]),
            "state": SessionState(value["state"]),
            "head_hash": bytes.fromhex(value["head_hash"]),
            "parent": None if value["parent"] is None else SessionName.parse(value["parent"]),
            "policy": CheckpointPolicy(*value["policy"]),
            "numerics_ids": tuple(value["numerics_ids"]),
        }
    )


def workflow_to_value(row: WorkflowRow) -> dict[str, Any]:
    """A workflow as a JSON object."""
    return {
        "workflow": row.workflow,
        "labels": row.labels,
        "create_us": row.create_us,
        "update_us": row.update_us,
        "delete_us": row.delete_us,
        "revision": row.revision,
        "standbys": row.standbys,
    }


def workflow_from_value(value: dict[str, Any]) -> WorkflowRow:
    """The inverse of workflow_to_value."""
    return WorkflowRow(**value)


def checkpoint_to_value(row: CheckpointRow) -> dict[str, Any]:
    """A checkpoint as a JSON object."""
    return {
        "session": str(row.session),
        "checkpoint": row.checkpoint,
        "position": row.position,
        "grid_position": row.grid_position,
        "chain_hash": row.chain_hash.hex(),
        "numerics_id": row.numerics_id,
        "automatic": row.automatic,
        "create_us": row.create_us,
        "expire_us": row.expire_us,
    }


def checkpoint_from_value(value: dict[str, Any]) -> CheckpointRow:
    """The inverse of checkpoint_to_value."""
    chain_hash = bytes.fromhex(value["chain_hash"])
    return CheckpointRow(**{**value, "session": SessionName.parse(value["session"]), "chain_hash": chain_hash})
