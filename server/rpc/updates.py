"""Updates: which fields a mask changes, and the revision that guards the change."""

from collections.abc import Iterable
from dataclasses import dataclass

from forkpoint.clock import Clock
from forkpoint.errors import EtagMismatchError, FieldNotSupportedError, InvalidFieldError
from forkpoint.proto.forkpoint.v1.session_pb2 import Session
from forkpoint.proto.forkpoint.v1.session_service_pb2 import UpdateSessionRequest
from forkpoint.proto.forkpoint.v1.workflow_pb2 import UpdateWorkflowRequest
from forkpoint.server.rpc import requests
from forkpoint.statestore.records import CheckpointPolicy, SessionRow, WorkflowRow

_POLICY = "checkpoint_policy"
_EXPIRATION_PATHS = frozenset({"expire_time", "ttl"})
_POLICY_PATHS = frozenset({_POLICY, *(f"{_POLICY}.{name}" for name in ("every_tokens", "on_turn_end", "keep_last"))})


@dataclass(frozen=True, slots=True)
class SessionChange:
    """What to change; None leaves it. `revision` None: whatever the row's is."""

    revision: int | None
    labels: dict[str, str] | None
    policy: CheckpointPolicy | None
    expire_us: int | None
    standbys: int | None


def revision_of(etag: str, resource: str, current: int) -> int | None:
    """The revision that an etag names; None without one. EtagMismatchError when it is not the current one."""
    if not etag:
        return None
    if etag != str(current):
        raise EtagMismatchError(resource, str(current))
    return current


def session_update(request: UpdateSessionRequest, current: SessionRow, clock: Clock) -> SessionChange:
    """What an UpdateSession changes. A change of a part of the policy is guarded by the row it was made from."""
    asked = request.session
    known = {"labels", "standbys", *_EXPIRATION_PATHS, *_POLICY_PATHS}
    paths = _paths(request.update_mask.paths or _implied(asked), known)
    revision = revision_of(asked.etag, str(current.name), current.revision)
    policy = None
    if paths & _POLICY_PATHS:
        policy = _policy(request, current.policy, paths)
        revision = current.revision
    return SessionChange(
        revision=revision,
        labels=requests.labels(asked.labels, "session.labels") if "labels" in paths else None,
        policy=policy,
        expire_us=_expire_us(asked, clock) if paths & _EXPIRATION_PATHS else None,
        standbys=requests.standbys(asked.standbys, "session.standbys") if "standbys" in paths else None,
    )


def _expire_us(asked: Session, clock: Clock) -> int:
    expire_us = requests.expire_us(asked, "session.", clock)
    if expire_us is None:
        raise FieldNotSupportedError("session.expiration", "can be moved, not taken away")
    return expire_us


def _implied(asked: Session) -> list[str]:
    """Paths of an update without a mask: what is set."""
    paths = ["labels"] if asked.labels else []
    if asked.HasField("checkpoint_policy"):
        paths.append(_POLICY)
    if asked.standbys:
        paths.append("standbys")
    expiration = asked.WhichOneof("expiration")
    return [*paths, expiration] if expiration else paths


def _policy(request: UpdateSessionRequest, current: CheckpointPolicy, paths: set[str]) -> CheckpointPolicy:
    asked = requests.policy(request.session.checkpoint_policy, current, "session.checkpoint_policy")
    if _POLICY in paths:
        return asked
    return CheckpointPolicy(
        every_tokens=asked.every_tokens if f"{_POLICY}.every_tokens" in paths else current.every_tokens,
        on_turn_end=asked.on_turn_end if f"{_POLICY}.on_turn_end" in paths else current.on_turn_end,
        keep_last=asked.keep_last if f"{_POLICY}.keep_last" in paths else current.keep_last,
    )


@dataclass(frozen=True, slots=True)
class WorkflowChange:
    """As SessionChange."""

    revision: int | None
    labels: dict[str, str] | None
    standbys: int | None


def workflow_update(request: UpdateWorkflowRequest, current: WorkflowRow) -> WorkflowChange:
    """What an UpdateWorkflow changes. Without a mask: the labels, and the standbys when they are set."""
    asked = request.workflow
    implied = ["labels", "standbys"] if asked.standbys else ["labels"]
    paths = _paths(request.update_mask.paths or implied, {"labels", "standbys"})
    return WorkflowChange(
        revision=revision_of(asked.etag, asked.name, current.revision),
        labels=requests.labels(asked.labels, "workflow.labels") if "labels" in paths else None,
        standbys=requests.standbys(asked.standbys, "workflow.standbys") if "standbys" in paths else None,
    )


def _paths(paths: Iterable[str], known: set[str]) -> set[str]:
    asked = set(paths)
    if not asked:
        raise InvalidFieldError("update_mask", "nothing to update")
    for path in sorted(asked - known):
        raise FieldNotSupportedError(f"update_mask.{path}", "can't be updated")
    return asked
