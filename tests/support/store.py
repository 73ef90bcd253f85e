"""What the store's tests share: a clock that is set by hand, a marker, and rows with sensible values."""

from forkpoint.ids import SessionName
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.records import (
    SCHEMA_VERSION,
    CheckpointPolicy,
    GenerationParams,
    NewSession,
    NodeRow,
    RequestKey,
    SamplingParams,
    SessionRow,
    StoreMarker,
    WorkflowRow,
)

MARKER = StoreMarker(SCHEMA_VERSION, "default", bytes(range(32)), bytes(range(32, 64)))
POLICY = CheckpointPolicy(every_tokens=512)
PARAMS = GenerationParams(SamplingParams(0.7, 40, 0.95, 0.05, -(2**63)), 100, (b"\xff\x00stop",), (3, 4), True)
DAY_US = 24 * 3600 * 1_000_000


class ManualClock:
    """A clock that moves when told, and by one microsecond at every look."""

    def __init__(self) -> None:
        self.now_us = 1_700_000_000_000_000

    def monotonic(self) -> float:
        return self.now_us / 1e6

    def wall_us(self) -> int:
        self.now_us += 1
        return self.now_us


def name(session: str, workflow: str = "w") -> SessionName:
    """A session name in workflow `w`."""
    return SessionName(workflow, session)


def new(session: str, workflow: str = "w", **fields: object) -> NewSession:
    """A session to create."""
    values: dict[str, object] = {"seed": -5, "policy": POLICY, "labels": {"k": "v"}, **fields}
    return NewSession(name(session, workflow), **values)  # type: ignore[arg-type]


def request(request_id: str, digest: bytes = b"d", caller: str = "me", workflow: str = "w") -> RequestKey:
    """A request key."""
    return RequestKey(caller, workflow, request_id, digest)


async def owned(catalog: Catalog, session: str, workflow: str = "w", owner: str = "node-a") -> SessionRow:
    """A fresh session that `owner` owns at epoch 1, its workflow and its owner's node made when missing."""
    if owner not in {node.incarnation for node in await catalog.list_nodes()}:
        await catalog.register_node(NodeRow(owner, owner, "", ""))
    if workflow not in {row.workflow for row in await catalog.list_workflows("", 1000)}:
        await catalog.create_workflow(WorkflowRow(workflow))
    await catalog.create_session(new(session, workflow))
    return await catalog.acquire(name(session, workflow), owner, 0)
