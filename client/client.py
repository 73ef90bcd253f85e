"""The client: `async with Client("127.0.0.1:50061") as client: …`."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Self

import grpc
from grpc_health.v1 import health_pb2

from forkpoint.client.errors import RemoteError, remote_error
from forkpoint.client.resume import Patience
from forkpoint.client.session import Sessions, fresh_request_id, workflow_name
from forkpoint.client.wire import LONG_DEADLINE_SECONDS, Wire
from forkpoint.clock import Clock, SystemClock
from forkpoint.proto.forkpoint.v1 import admin_pb2, checkpoint_pb2, common_pb2, workflow_pb2

READY_POLL_SECONDS: Final = 0.05


class Client:
    """A connection to the service at one or more addresses (`host:port`).

    `patience_s`: how long streams try to reconnect without hearing anything. Unary calls have a deadline, and are
    repeated by gRPC while the node is UNAVAILABLE (four tries within about two seconds), then on the other addresses.
    """

    def __init__(self, addresses: str | Sequence[str], *, patience_s: float = 60.0, clock: Clock | None = None) -> None:
        self._wire = Wire([addresses] if isinstance(addresses, str) else list(addresses))
        self._clock = clock or SystemClock()
        patience = Patience(total_s=patience_s, clock=self._clock)
        self.workflows = Workflows(self._wire)
        self.sessions = Sessions(self._wire, patience)
        self.checkpoints = Checkpoints(self._wire)
        self.nodes = Nodes(self._wire)
        self.garbage = Garbage(self._wire)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections. Idempotent."""
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
        self, workflow_id: str = "", *, labels: Mapping[str, str] | None = None, request_id: str | None = None
    ) -> workflow_pb2.Workflow:
        """A new workflow."""
        request = workflow_pb2.CreateWorkflowRequest(
            workflow_id=workflow_id,
            workflow=workflow_pb2.Workflow(labels=labels or {}),
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

    async def update(self, workflow: str, labels: Mapping[str, str], *, etag: str = "") -> workflow_pb2.Workflow:
        """Replace the labels."""
        resource = workflow_pb2.Workflow(name=workflow_name(workflow), labels=labels, etag=etag)
        request = workflow_pb2.UpdateWorkflowRequest(workflow=resource)
        request.update_mask.paths.append("labels")
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

    async def verify(self, name: str) -> AsyncIterator[checkpoint_pb2.VerifyProgress]:
        """Read every part and compare its digest: one event a part, then the result."""
        request = checkpoint_pb2.VerifyCheckpointRequest(name=name)
        stub = self._wire.connection(_session_of(name)).checkpoints
        call = stub.VerifyCheckpoint(request, timeout=LONG_DEADLINE_SECONDS)
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as failure:
            raise remote_error(failure) from None
        finally:
            call.cancel()


class Garbage:
    """What nobody needs any more."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def collect(self, *, dry_run: bool = False) -> AsyncGenerator[admin_pb2.GcProgress, None]:
        """Collect every tier that the node can reach: counts as they grow, the last of each tier with `done`. Raises
        RemoteError with COLLECTED_ELSEWHERE while another node collects. Closing the iterator stops the work."""
        request = admin_pb2.CollectGarbageRequest(dry_run=dry_run)
        call = self._wire.connection().admin.CollectGarbage(request)
        try:
            async for event in call:
                yield event
        except grpc.aio.AioRpcError as failure:
            raise remote_error(failure) from None
        finally:
            call.cancel()


class Nodes:
    """Nodes that the store knows."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    async def list(self) -> AsyncIterator[admin_pb2.Node]:
        """Incarnations, in order of registration."""
        request = admin_pb2.ListNodesRequest()
        while True:
            page = await self._wire.unary(lambda c: c.admin.ListNodes, request)
            for node in page.nodes:
                yield node
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def get(self, node: str) -> admin_pb2.Node:
        """By id or name: its newest incarnation."""
        name = node if node.startswith("nodes/") else f"nodes/{node}"
        return await self._wire.unary(lambda c: c.admin.GetNode, admin_pb2.GetNodeRequest(name=name))


def _session_of(checkpoint: str) -> str:
    return checkpoint.partition("/checkpoints/")[0]
