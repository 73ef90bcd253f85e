"""The client: `async with Client("127.0.0.1:50061") as client: …`."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import grpc
from grpc_health.v1 import health_pb2

from forkpoint.client.errors import RemoteError, remote_error
from forkpoint.client.events import Events
from forkpoint.client.nodes import Nodes
from forkpoint.client.resume import Patience
from forkpoint.client.session import Sessions, fresh_request_id, workflow_name
from forkpoint.client.wire import LONG_DEADLINE_SECONDS, Wire
from forkpoint.clock import Clock, SystemClock
from forkpoint.proto.forkpoint.v1 import admin_pb2, checkpoint_pb2, common_pb2, workflow_pb2

READY_POLL_SECONDS: Final = 0.05


class Client:
    """A connection to the service at one or more addresses (`host:port`). Any node takes any call.

    `patience_s`: how long streams try to reconnect without hearing anything. Unary calls have a deadline, and are
    repeated by gRPC while the node is UNAVAILABLE (four tries within about two seconds), then on the other addresses.
    Nothing else is repeated. `direct`: calls for a session go straight to its owner, which costs a redirect when it has
    moved and saves the hop through another node; the client must reach the addresses that nodes advertise.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        patience_s: float = 60.0,
        direct: bool = False,
        clock: Clock | None = None,
    ) -> None:
        self._wire = Wire([addresses] if isinstance(addresses, str) else list(addresses), direct)
        self._clock = clock or SystemClock()
        patience = Patience(total_s=patience_s, clock=self._clock)
        self.workflows = Workflows(self._wire)
        self.sessions = Sessions(self._wire, patience)
        self.checkpoints = Checkpoints(self._wire)
        self.nodes = Nodes(self._wire, patience)
        self.garbage = Garbage(self._wire)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections; calls under way and later ones raise ClientClosedError. Idempotent."""
        await self._wire.close()

    async def ready(self, timeout_s: float = 60.0) -> None:
        """Wait until a node says that it serves. Raises RemoteError (the last failure) when none does in time."""
        deadline = self._clock.monotonic() + timeout_s
        while True:
            connection = self._wire.connection()
            check: Any = connection.channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            try:
                answer = await check(health_pb2.HealthCheckRequest(), timeout=max(0.1, min(5.0, timeout_s)))
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
                error = RemoteError("UNAVAILABLE", "", f"{connection.address} does not serve yet", {})
            except grpc.aio.AioRpcError as failure:
                error = remote_error(failure)
            if self._clock.monotonic() >= deadline:
                raise error
            self._wire.follow(error, "", connection)
            await asyncio.sleep(READY_POLL_SECONDS)


class Workflows:
    """All workflows of the service."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def create(
        self,
        workflow_id: str = "",
        *,
        labels: Mapping[str, str] | None = None,
        standbys: int = 0,
        request_id: str | None = None,
    ) -> workflow_pb2.Workflow:
        """A new workflow. `standbys`: hot standbys of each session that is made in it and says nothing."""
        request = workflow_pb2.CreateWorkflowRequest(
            workflow_id=workflow_id,
            workflow=workflow_pb2.Workflow(labels=labels or {}, standbys=standbys),
            request_id=request_id or fresh_request_id(),
        )
        return await self._wire.unary(lambda c: c.workflows.CreateWorkflow, request)

    async def get(self, workflow: str) -> workflow_pb2.Workflow:
        """By id or name."""
        request = workflow_pb2.GetWorkflowRequest(name=workflow_name(workflow))
        return await self._wire.unary(lambda c: c.workflows.GetWorkflow, request)

    async def list(self) -> AsyncIterator[workflow_pb2.Workflow]:
        """All workflows, ascending by name."""
        request = workflow_pb2.ListWorkflowsRequest()
        while True:
            page = await self._wire.unary(lambda c: c.workflows.ListWorkflows, request)
            for workflow in page.workflows:
                yield workflow
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def update(
        self,
        workflow: str,
        labels: Mapping[str, str] | None = None,
        *,
        standbys: int | None = None,
        etag: str = "",
    ) -> workflow_pb2.Workflow:
        """Change what is given: replace the labels; `standbys` holds for sessions made from now on."""
        resource = workflow_pb2.Workflow(name=workflow_name(workflow), labels=labels or {}, etag=etag)
        request = workflow_pb2.UpdateWorkflowRequest(workflow=resource)
        if labels is not None:
            request.update_mask.paths.append("labels")
        if standbys is not None:
            request.workflow.standbys = standbys
            request.update_mask.paths.append("standbys")
        return await self._wire.unary(lambda c: c.workflows.UpdateWorkflow, request)

    async def delete(self, workflow: str) -> None:
        """Delete a workflow whose sessions are all deleted."""
        request = workflow_pb2.DeleteWorkflowRequest(name=workflow_name(workflow))
        await self._wire.unary(lambda c: c.workflows.DeleteWorkflow, request)

    async def usage(self, workflow: str) -> common_pb2.Usage:
        """Tokens of all its sessions; what forks share is counted once."""
        request = workflow_pb2.GetUsageRequest(name=workflow_name(workflow))
        return await self._wire.unary(lambda c: c.workflows.GetUsage, request)

    async def session_usage(self, workflow: str) -> AsyncIterator[workflow_pb2.SessionUsage]:
        """Tokens of each session's whole log, ascending by name."""
        request = workflow_pb2.ListSessionUsageRequest(parent=workflow_name(workflow))
        while True:
            page = await self._wire.unary(lambda c: c.workflows.ListSessionUsage, request)
            for usage in page.usages:
                yield usage
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


class Checkpoints:
    """Checkpoints by name; Session.checkpoint makes them."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def get(self, name: str) -> checkpoint_pb2.Checkpoint:
        """With its parts."""
        request = checkpoint_pb2.GetCheckpointRequest(name=name)
        return await self._wire.unary(lambda c: c.checkpoints.GetCheckpoint, request, _session_of(name))

    async def list(self, session: str) -> AsyncIterator[checkpoint_pb2.Checkpoint]:
        """Of one session, ascending by position."""
        request = checkpoint_pb2.ListCheckpointsRequest(parent=session)
        while True:
            page = await self._wire.unary(lambda c: c.checkpoints.ListCheckpoints, request, session)
            for checkpoint in page.checkpoints:
                yield checkpoint
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def delete(self, name: str, *, request_id: str | None = None) -> checkpoint_pb2.Checkpoint:
        """Take its name away; answers with it, without parts. Its state is collected once no other has the same."""
        request = checkpoint_pb2.DeleteCheckpointRequest(name=name, request_id=request_id or fresh_request_id())
        return await self._wire.unary(lambda c: c.checkpoints.DeleteCheckpoint, request, _session_of(name))

    def verify(self, name: str) -> Events[checkpoint_pb2.VerifyProgress]:
        """Read every part and compare its digest: one event a part, then the result."""
        request = checkpoint_pb2.VerifyCheckpointRequest(name=name)
        return Events(
            self._wire.stream(
                lambda c: c.checkpoints.VerifyCheckpoint(request, timeout=LONG_DEADLINE_SECONDS, metadata=c.metadata),
                _session_of(name),
            )
        )


class Garbage:
    """What nobody needs any more."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def collect(self, *, dry_run: bool = False) -> Events[admin_pb2.GcProgress]:
        """Collect every tier that the node can reach: counts as they grow, the last of each tier with `done`. Raises
        RemoteError with COLLECTED_ELSEWHERE while another node collects."""
        request = admin_pb2.CollectGarbageRequest(dry_run=dry_run)
        return Events(self._wire.stream(lambda c: c.admin.CollectGarbage(request, metadata=c.metadata)))


def _session_of(checkpoint: str) -> str:
    return checkpoint.partition("/checkpoints/")[0]
