"""Nodes, workflows and request ids of the in-memory catalog."""

import json
from dataclasses import replace
from typing import Any, Final

from forkpoint.clock import Clock, SystemClock
from forkpoint.errors import (
    AlreadyExistsError,
    EtagMismatchError,
    NotFoundError,
    PreconditionError,
    RequestIdReusedError,
    StoreUnavailableError,
)
from forkpoint.limits import REQUEST_ID_KEEP_SECONDS
from forkpoint.statestore.chain import root_hash
from forkpoint.statestore.memory.store import MemoryTables, StoredAnswer, answer_key
from forkpoint.statestore.records import (
    Durability,
    NodeRow,
    NodeStatus,
    RequestKey,
    SessionState,
    StoreMarker,
    WorkflowRow,
)
from forkpoint.statestore.rowjson import dump, workflow_from_value, workflow_to_value
from forkpoint.statestore.rules import check_marker

KEEP_US: Final = REQUEST_ID_KEEP_SECONDS * 1_000_000


class MemoryRows:
    """The part of the catalog that knows nothing of sessions' contents. No method waits inside: each is atomic."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._marker: StoreMarker | None = None
        self._tables = MemoryTables()
        self._closed = False
        self._root = b""

    @property
    def durability(self) -> Durability:
        return Durability.MEMORY

    @property
    def broken(self) -> str | None:
        return None

    @property
    def marker(self) -> StoreMarker:
        if self._marker is None:
            raise StoreUnavailableError("memory", "it is not open")
        return self._marker

    async def open(self, marker: StoreMarker) -> None:
        if self._marker is not None:
            check_marker(self._marker, marker)
        self._root = root_hash(marker)
        self._marker = marker
        self._closed = False

    async def close(self) -> None:
        self._closed = True

    # --- nodes -------------------------------------------------------------------------------------------------
    async def register_node(self, node: NodeRow) -> None:
        nodes = self._open().nodes
        if node.incarnation in nodes:
            raise AlreadyExistsError(f"nodes/{node.incarnation}")
        nodes[node.incarnation] = replace(node, counter=1)

    async def renew_lease(self, incarnation: str, status: NodeStatus | None = None) -> int:
        nodes = self._open().nodes
        row = nodes.get(incarnation)
        if row is None:
            raise NotFoundError(f"nodes/{incarnation}")
        nodes[incarnation] = replace(row, counter=row.counter + 1, status=row.status if status is None else status)
        return row.counter + 1

    async def remove_node(self, incarnation: str) -> None:
        self._open().nodes.pop(incarnation, None)

    async def list_nodes(self) -> list[NodeRow]:
        return list(self._open().nodes.values())

    # --- workflows ---------------------------------------------------------------------------------------------
    async def create_workflow(self, row: WorkflowRow, request: RequestKey | None = None) -> WorkflowRow:
        answer = self._answer(request, "create_workflow")
        if answer is not None:
            return workflow_from_value(answer)
        workflows = self._open().workflows
        if row.workflow in workflows:
            raise AlreadyExistsError(f"workflows/{row.workflow}")
        now = self._clock.wall_us()
        created = WorkflowRow(row.workflow, dict(row.labels), now, now, standbys=row.standbys)
        workflows[row.workflow] = created
        self._keep(request, "create_workflow", workflow_to_value(created))
        return _workflow_copy(created)

    async def get_workflow(self, workflow: str) -> WorkflowRow:
        return _workflow_copy(self._workflow(workflow))

    async def list_workflows(self, after: str, limit: int) -> list[WorkflowRow]:
        rows = sorted(self._open().workflows.values(), key=lambda row: row.workflow)
        return [_workflow_copy(row) for row in rows if row.workflow > after and row.delete_us is None][:limit]

    async def update_workflow(
        self, workflow: str, labels: dict[str, str] | None, revision: int | None, standbys: int | None = None
    ) -> WorkflowRow:
        row = self._workflow(workflow)
        if revision is not None and revision != row.revision:
            raise EtagMismatchError(f"workflows/{workflow}", str(row.revision))
        changed = replace(
            row,
            labels=dict(row.labels if labels is None else labels),
            update_us=self._clock.wall_us(),
            revision=row.revision + 1,
            standbys=row.standbys if standbys is None else standbys,
        )
        self._open().workflows[workflow] = changed
        return _workflow_copy(changed)

    async def delete_workflow(self, workflow: str) -> None:
        row = self._workflow(workflow)
        for name, stored in self._open().sessions.items():
            if name.workflow == workflow and stored.row.state is not SessionState.DELETED:
                raise PreconditionError(f"workflows/{workflow} still has sessions, {name.session} among them")
        now = self._clock.wall_us()
        self._open().workflows[workflow] = replace(row, delete_us=now, update_us=now, revision=row.revision + 1)

    # --- request ids -------------------------------------------------------------------------------------------
    async def find_request(self, request: RequestKey) -> str | None:
        return self._answer_text(request)

    def _answer_text(self, request: RequestKey | None, call: str | None = None) -> str | None:
        """The stored answer, None when there is none. RequestIdReusedError when it answered another digest or call."""
        answers = self._open().answers
        stored = None if request is None else answers.get(answer_key(request))
        if request is None or stored is None or stored.create_us <= self._clock.wall_us() - KEEP_US:
            return None
        if stored.digest != request.digest or call not in (None, stored.call):
            raise RequestIdReusedError(request.request_id)
        return stored.text

    def _answer(self, request: RequestKey | None, call: str) -> Any:
        text = self._answer_text(request, call)
        return None if text is None else json.loads(text)

    def _keep(self, request: RequestKey | None, call: str, answer: Any) -> None:
        """Keep the answer of a call and forget those that are too old; they lie in the order in which they came."""
        if request is None:
            return
        answers, now = self._open().answers, self._clock.wall_us()
        answers.pop(answer_key(request), None)
        while answers and next(iter(answers.values())).create_us <= now - KEEP_US:
            del answers[next(iter(answers))]
        answers[answer_key(request)] = StoredAnswer(request.digest, call, dump(answer), now)

    # --- shared ------------------------------------------------------------------------------------------------
    def _open(self) -> MemoryTables:
        if self._closed or self._marker is None:
            raise StoreUnavailableError("memory", "it is closed" if self._closed else "it is not open")
        return self._tables

    def _workflow(self, workflow: str) -> WorkflowRow:
        row = self._open().workflows.get(workflow)
        if row is None or row.delete_us is not None:
            raise NotFoundError(f"workflows/{workflow}")
        return row


def _workflow_copy(row: WorkflowRow) -> WorkflowRow:
    return replace(row, labels=dict(row.labels))
