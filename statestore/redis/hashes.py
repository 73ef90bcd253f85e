"""Rows as Redis keeps them: hashes of text and bytes. docs/formats.md names their fields."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forkpoint.errors import LogCorruptError
from forkpoint.ids import SessionName
from forkpoint.limits import DIGEST_BYTES
from forkpoint.statestore.chain import HashChain
from forkpoint.statestore.records import (
    CheckpointPolicy,
    CheckpointRow,
    FinishReason,
    GenerationRow,
    ManifestKey,
    ManifestRow,
    NewSession,
    NodeRow,
    SessionRow,
    SessionState,
    WorkflowRow,
)
from forkpoint.statestore.rowjson import dump, params_from_json, status_from_json

Fields = Mapping[str, bytes]


@dataclass(frozen=True, slots=True)
class StoredSession:
    """A session row with what only the store needs."""

    row: SessionRow
    chain: HashChain
    open_generation: str | None


def fields_of(flat: Sequence[bytes]) -> dict[str, bytes]:
    """A hash from the list of its fields and values."""
    return {bytes(name).decode(): bytes(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}


def flat_of(**fields: bytes | str | int | None) -> list[bytes | str | int]:
    """Fields and values as a list, its length first; None is left out, as a hash has no such thing."""
    values = [part for name, value in fields.items() if value is not None for part in (name, value)]
    return [len(values), *values]


def chain_bytes(chain: HashChain) -> bytes:
    """A chain as rows keep it: the last link on the grid, then the packed ids behind it."""
    return chain.grid_hash + chain.tail


def chain_from(position: int, data: bytes) -> HashChain:
    """The inverse of chain_bytes. Raises ValueError."""
    return HashChain(position, data[:DIGEST_BYTES], data[DIGEST_BYTES:])


def workflow_of(workflow: str, fields: Fields) -> WorkflowRow:
    """Raises KeyError, ValueError for a damaged row; so do the others here."""
    return WorkflowRow(
        workflow,
        json.loads(fields["labels"]),
        int(fields["create"]),
        int(fields["update"]),
        _number(fields, "delete"),
        int(fields["revision"]),
        int(fields.get("standbys", 0)),
    )


def session_fields(new: NewSession) -> list[bytes | str | int]:
    """What a caller says of a new session."""
    return flat_of(
        seed=new.seed,
        labels=dump(new.labels),
        transient=int(new.transient),
        expire=new.expire_us,
        standbys=new.standbys,
        exact=1,
        numerics=dump([]),
        **policy_fields(new.policy),
    )


def policy_fields(policy: CheckpointPolicy) -> dict[str, int]:
    """A checkpoint policy's fields."""
    return {"every": policy.every_tokens, "turn_end": int(policy.on_turn_end), "keep": policy.keep_last}


def session_of(name: SessionName, fields: Fields) -> StoredSession:
    """The session that a hash holds. Raises LogCorruptError for a damaged row: its log can't be told from another's."""
    try:
        return _session_of(name, fields)
    except (LookupError, TypeError, ValueError) as broken:
        detail = f"its row can't be read: {type(broken).__name__}: {broken}"
        raise LogCorruptError(str(name), 0, 0, detail) from broken


def _session_of(name: SessionName, fields: Fields) -> StoredSession:
    chain = chain_from(int(fields["head"]), fields["chain"])
    parent = fields.get("parent")
    generation = fields.get("generation")
    row = SessionRow(
        name=name,
        branch=fields["branch"].decode(),
        state=SessionState(fields["state"].decode()),
        state_reason=fields["reason"].decode(),
        head=chain.position,
        head_hash=chain.head_hash(),
        epoch=int(fields["epoch"]),
        owner=fields["owner"].decode(),
        parent=None if parent is None else SessionName(name.workflow, parent.decode()),
        fork_position=int(fields["fork"]),
        seed=int(fields["seed"]),
        policy=CheckpointPolicy(int(fields["every"]), fields["turn_end"] == b"1", int(fields["keep"])),
        labels=json.loads(fields["labels"]),
        transient=fields["transient"] == b"1",
        exact=fields["exact"] == b"1",
        numerics_ids=tuple(json.loads(fields["numerics"])),
        expire_us=_number(fields, "expire"),
        create_us=int(fields["create"]),
        update_us=int(fields["update"]),
        delete_us=_number(fields, "delete"),
        purge_us=_number(fields, "purge"),
        revision=int(fields["revision"]),
        standbys=int(fields.get("standbys", 0)),
        migration=fields.get("migration", b"").decode(),
        migration_target=fields.get("target", b"").decode(),
        takeovers=int(fields.get("takeovers", 0)),
        takeover_head=int(fields.get("takeover_head", 0)),
    )
    return StoredSession(row, chain, None if generation is None else generation.decode())


def generation_of(name: SessionName, generation: str, fields: Fields) -> GenerationRow:
    """The generation that a hash holds."""
    finish = fields.get("finish")
    return GenerationRow(
        generation=generation,
        session=name,
        request_id=fields["request"].decode(),
        start=int(fields["start"]),
        params=params_from_json(fields["params"].decode()),
        finish=None if finish is None else FinishReason(finish.decode()),
        end=_number(fields, "end"),
        input_start=_number(fields, "input"),
        branch=fields["branch"].decode(),
    )


def checkpoint_of(workflow: str, found: Sequence[Any]) -> CheckpointRow:
    """The checkpoint in [session, id, hash as a list]."""
    fields = fields_of(found[2])
    return CheckpointRow(
        session=SessionName(workflow, bytes(found[0]).decode()),
        checkpoint=bytes(found[1]).decode(),
        position=int(fields["position"]),
        grid_position=int(fields["grid"]),
        chain_hash=fields["chain"],
        numerics_id=fields["numerics"].decode(),
        automatic=fields["automatic"] == b"1",
        create_us=int(fields["create"]),
        expire_us=_number(fields, "expire"),
    )


def node_of(incarnation: str, fields: Fields) -> NodeRow:
    """The incarnation that a hash holds."""
    return NodeRow(
        incarnation,
        fields["node"].decode(),
        fields["address"].decode(),
        fields["numerics"].decode(),
        int(fields["counter"]),
        fields["lock"].decode(),
        status_from_json(fields.get("status", b"{}")),
    )


def point_text(chain_hash: bytes, grid_position: int) -> str:
    """A point of a chain in a key."""
    return f"{chain_hash.hex()}:{grid_position}"


def manifest_key_text(key: ManifestKey) -> str:
    """A manifest's key in keys of the store."""
    return f"{point_text(key.chain_hash, key.grid_position)} {key.numerics_id}"


def manifest_key_of(text: str) -> ManifestKey:
    """The inverse of manifest_key_text."""
    point, _, numerics_id = text.partition(" ")
    chain_hash, _, grid_position = point.partition(":")
    return ManifestKey(bytes.fromhex(chain_hash), int(grid_position), numerics_id)


def manifest_of(key: ManifestKey, fields: Fields) -> ManifestRow:
    """The manifest that a hash holds."""
    return ManifestRow(key.numerics_id, key.grid_position, key.chain_hash, fields["manifest"], int(fields["create"]))


def _number(fields: Fields, name: str) -> int | None:
    value = fields.get(name)
    return None if value is None else int(value)
