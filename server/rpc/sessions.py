"""SessionService."""

from collections.abc import AsyncIterator
from typing import Any

from forkpoint.clock import Clock
from forkpoint.errors import InvalidFieldError
from forkpoint.ids import SessionName, parse_workflow
from forkpoint.limits import APPEND_TEXT_BYTES_MAX, TEXT_BYTES_MAX
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.proto.forkpoint.v1.export_pb2 import ExportChunk
from forkpoint.proto.forkpoint.v1.session_pb2 import Session
from forkpoint.proto.forkpoint.v1.session_service_pb2_grpc import SessionServiceServicer
from forkpoint.server.rpc import requests, responses
from forkpoint.server.rpc.errors import MethodNotImplementedError
from forkpoint.server.rpc.generation import GenerationSource, TokensSource
from forkpoint.server.rpc.identity import request_key
from forkpoint.server.rpc.paging import cut_page, page_size, page_start
from forkpoint.server.rpc.served import Served
from forkpoint.server.rpc.transfer import export_chunks, import_stream
from forkpoint.server.rpc.updates import session_update
from forkpoint.server.rpc.upload import assemble
from forkpoint.server.session.api import CreateSession, SessionNode
from forkpoint.statestore.records import CheckpointPolicy


class Sessions(SessionServiceServicer):
    """Converts, calls the session layer, converts back. Errors pass through: the guard maps them."""

    def __init__(self, node: SessionNode, served: Served, clock: Clock) -> None:
        self._node = node
        self._served = served
        self._clock = clock

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Any) -> Session:
        workflow = parse_workflow(request.parent, "parent")
        asked = request.session
        name = SessionName(workflow, requests.child_id(request.session_id, "session_id", "s"))
        policy = None
        if asked.HasField("checkpoint_policy"):
            default = CheckpointPolicy(self._served.checkpoint_every)
            policy = requests.policy(asked.checkpoint_policy, default, "session.checkpoint_policy")
        call = CreateSession(
            name=name,
            seed=request.seed if request.HasField("seed") else None,
            policy=policy,
            labels=requests.labels(asked.labels, "session.labels"),
            transient=asked.transient,
            expire_us=requests.expire_us(asked, "session.", self._clock),
            standbys=requests.standbys(asked.standbys, "session.standbys"),
            request=request_key(request, workflow, request.request_id),
        )
        return responses.session(await self._node.create_session(call), self._served)

    async def GetSession(self, request: pb.GetSessionRequest, context: Any) -> Session:
        view = await self._node.get_session(SessionName.parse(request.name))
        return responses.session(view, self._served)

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsResponse:
        everywhere = request.parent == "workflows/-"
        workflow = None if everywhere else parse_workflow(request.parent, "parent")
        listing = f"sessions of {request.parent} {request.show_deleted}"
        after = page_start(request.page_token, listing)
        size = page_size(request.page_size)
        views = await self._node.list_sessions(
            workflow, SessionName.parse(after, "page_token") if after else None, size + 1, request.show_deleted
        )
        rows = (responses.session(view, self._served) for view in views)
        page, token = cut_page(rows, size, lambda session: session.name, listing)
        return pb.ListSessionsResponse(sessions=page, next_page_token=token)

    async def UpdateSession(self, request: pb.UpdateSessionRequest, context: Any) -> Session:
        name = SessionName.parse(request.session.name, "session.name")
        current = (await self._node.get_session(name)).row
        change = session_update(request, current, self._clock)
        view = await self._node.update_session(
            name, change.revision, change.labels, change.policy, change.expire_us, change.standbys
        )
        return responses.session(view, self._served)

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Any) -> Session:
        name = SessionName.parse(request.name)
        view = await self._node.delete_session(name, request_key(request, name.workflow, request.request_id))
        return responses.session(view, self._served)

    async def UndeleteSession(self, request: pb.UndeleteSessionRequest, context: Any) -> Session:
        view = await self._node.undelete_session(SessionName.parse(request.name))
        return responses.session(view, self._served)

    async def Append(self, request: pb.AppendRequest, context: Any) -> pb.AppendResponse:
        call = requests.append_call(request, self._served, APPEND_TEXT_BYTES_MAX)
        return responses.append_result(await self._node.append(call), self._served)

    async def UploadAppend(self, request_iterator: AsyncIterator[pb.AppendChunk], context: Any) -> pb.AppendResponse:
        call = requests.append_call(await assemble(request_iterator), self._served, TEXT_BYTES_MAX)
        return responses.append_result(await self._node.append(call), self._served)

    def Generate(self, request: pb.GenerateRequest, context: Any) -> GenerationSource:
        return GenerationSource(self._node, requests.generate_call(request, self._served))

    async def CancelGeneration(self, request: pb.CancelGenerationRequest, context: Any) -> Session:
        view = await self._node.cancel_generation(SessionName.parse(request.name))
        return responses.session(view, self._served)

    def ReadTokens(self, request: pb.ReadTokensRequest, context: Any) -> TokensSource:
        name = SessionName.parse(request.name)
        start = requests.position(request.start, "start")
        end = requests.position(request.end, "end") if request.HasField("end") else None
        if end is not None and end < start:
            raise InvalidFieldError("end", f"{end} lies before start {start}")
        return TokensSource(self._node.read_tokens(name, start, end, request.follow), start)

    async def Fork(self, request: pb.ForkRequest, context: Any) -> pb.ForkResponse:
        views, position = await self._node.fork(requests.fork_call(request, self._clock))
        sessions = [responses.session(view, self._served) for view in views]
        return pb.ForkResponse(sessions=sessions, position=position)

    async def Rewind(self, request: pb.RewindRequest, context: Any) -> Session:
        name = SessionName.parse(request.name)
        position = requests.position(request.position, "position")
        view = await self._node.rewind(name, position, request_key(request, name.workflow, request.request_id))
        return responses.session(view, self._served)

    async def Pause(self, request: pb.PauseRequest, context: Any) -> Session:
        name = SessionName.parse(request.name)
        view = await self._node.pause(name, request_key(request, name.workflow, request.request_id))
        return responses.session(view, self._served)

    async def Resume(self, request: pb.ResumeRequest, context: Any) -> pb.ResumeResponse:
        name = SessionName.parse(request.name)
        result = await self._node.resume(name, request_key(request, name.workflow, request.request_id))
        return pb.ResumeResponse(
            session=responses.session(result.view, self._served),
            restored_tokens=result.restored_tokens,
            replayed_tokens=result.replayed_tokens,
            restored_bytes=result.restored_bytes,
            source=result.source,
            exact=result.exact,
        )

    def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.SessionEvent]:
        raise MethodNotImplementedError("SessionService.Watch")

    def Export(self, request: pb.ExportRequest, context: Any) -> AsyncIterator[ExportChunk]:
        return export_chunks(self._node, SessionName.parse(request.name))

    async def Import(self, request_iterator: AsyncIterator[ExportChunk], context: Any) -> Session:
        view = await import_stream(self._node, request_iterator, self._served, self._clock)
        return responses.session(view, self._served)
