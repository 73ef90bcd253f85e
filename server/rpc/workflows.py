"""WorkflowService."""

from typing import Any

from google.protobuf.empty_pb2 import Empty

from forkpoint.clock import Clock
from forkpoint.ids import SessionName, parse_workflow
from forkpoint.proto.forkpoint.v1 import workflow_pb2 as pb
from forkpoint.proto.forkpoint.v1.common_pb2 import Budget, Usage
from forkpoint.proto.forkpoint.v1.workflow_pb2_grpc import WorkflowServiceServicer
from forkpoint.server.rpc import requests, responses
from forkpoint.server.rpc.errors import MethodNotImplementedError
from forkpoint.server.rpc.identity import request_key
from forkpoint.server.rpc.paging import cut_page, page_size, page_start
from forkpoint.server.rpc.updates import workflow_update
from forkpoint.server.session.api import SessionNode
from forkpoint.statestore.records import WorkflowRow


class Workflows(WorkflowServiceServicer):
    """Converts, calls the session layer, converts back."""

    def __init__(self, node: SessionNode, clock: Clock) -> None:
        self._node = node
        self._clock = clock

    async def CreateWorkflow(self, request: pb.CreateWorkflowRequest, context: Any) -> pb.Workflow:
        workflow = requests.child_id(request.workflow_id, "workflow_id", "w")
        now = self._clock.wall_us()
        row = WorkflowRow(
            workflow=workflow,
            labels=requests.labels(request.workflow.labels, "workflow.labels"),
            create_us=now,
            update_us=now,
            standbys=requests.standbys(request.workflow.standbys, "workflow.standbys"),
        )
        key = request_key(request, request.workflow_id, request.request_id)
        return responses.workflow(await self._node.create_workflow(row, key))

    async def GetWorkflow(self, request: pb.GetWorkflowRequest, context: Any) -> pb.Workflow:
        return responses.workflow(await self._node.get_workflow(parse_workflow(request.name)))

    async def ListWorkflows(self, request: pb.ListWorkflowsRequest, context: Any) -> pb.ListWorkflowsResponse:
        after = page_start(request.page_token, "workflows")
        size = page_size(request.page_size)
        listed = await self._node.list_workflows(parse_workflow(after, "page_token") if after else "", size + 1)
        rows = (responses.workflow(row) for row in listed)
        page, token = cut_page(rows, size, lambda workflow: workflow.name, "workflows")
        return pb.ListWorkflowsResponse(workflows=page, next_page_token=token)

    async def UpdateWorkflow(self, request: pb.UpdateWorkflowRequest, context: Any) -> pb.Workflow:
        workflow = parse_workflow(request.workflow.name, "workflow.name")
        change = workflow_update(request, await self._node.get_workflow(workflow))
        row = await self._node.update_workflow(workflow, change.labels, change.revision, change.standbys)
        return responses.workflow(row)

    async def DeleteWorkflow(self, request: pb.DeleteWorkflowRequest, context: Any) -> Empty:
        await self._node.delete_workflow(parse_workflow(request.name))
        return Empty()

    async def GetBudget(self, request: pb.GetBudgetRequest, context: Any) -> Budget:
        raise MethodNotImplementedError("WorkflowService.GetBudget")

    async def UpdateBudget(self, request: pb.UpdateBudgetRequest, context: Any) -> Budget:
        raise MethodNotImplementedError("WorkflowService.UpdateBudget")

    async def GetUsage(self, request: pb.GetUsageRequest, context: Any) -> Usage:
        return responses.usage(await self._node.workflow_usage(parse_workflow(request.name)))

    async def ListSessionUsage(self, request: pb.ListSessionUsageRequest, context: Any) -> pb.ListSessionUsageResponse:
        workflow = parse_workflow(request.parent, "parent")
        listing = f"usage of {workflow}"
        after = page_start(request.page_token, listing)
        size = page_size(request.page_size)
        last = SessionName.parse(after, "page_token") if after else None
        views = await self._node.list_sessions(workflow, last, size + 1, False)
        rows = (pb.SessionUsage(session=str(view.row.name), usage=responses.usage(view.usage)) for view in views)
        page, token = cut_page(rows, size, lambda usage: usage.session, listing)
        return pb.ListSessionUsageResponse(usages=page, next_page_token=token)
