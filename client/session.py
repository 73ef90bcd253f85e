"""A session, and the collection of all sessions."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.field_mask_pb2 import FieldMask

from forkpoint.client.errors import remote_error
from forkpoint.client.events import Events
from forkpoint.client.generation import Generation, TokenReader
from forkpoint.client.inputs import Messages, append_request, chunks, is_large, utf8
from forkpoint.client.nodes import node_name
from forkpoint.client.resume import Patience
from forkpoint.client.wire import LONG_DEADLINE_SECONDS, Connection, Wire
from forkpoint.ids import new_id
from forkpoint.proto.forkpoint.v1 import admin_pb2, checkpoint_pb2, common_pb2, export_pb2, session_pb2
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb

SEED_POLICIES: Final[dict[str, "common_pb2.SeedPolicy.ValueType"]] = {
    "": common_pb2.SEED_POLICY_UNSPECIFIED,
    "inherit": common_pb2.INHERIT,
    "derive": common_pb2.DERIVE,
}


def fresh_request_id() -> str:
    """A request id that no other call has."""
    return new_id("r")


class Session:
    """One session by name. Holds no state of its own: every method asks the service, and raises RemoteError.

    Mutating calls take a `request_id`; without one a fresh id is made, so that retries inside a call are the same call.
    """

    def __init__(self, wire: Wire, name: str, patience: Patience) -> None:
        self.name = name
        self._wire = wire
        self._patience = patience

    def __repr__(self) -> str:
        return f"Session({self.name!r})"

    async def get(self) -> session_pb2.Session:
        """The resource as it is now."""
        return await self._wire.unary(lambda c: c.sessions.GetSession, pb.GetSessionRequest(name=self.name), self.name)

    async def append(
        self,
        *,
        tokens: Sequence[int] | None = None,
        text: str | bytes | None = None,
        messages: Messages | None = None,
        add_generation_prompt: bool = False,
        thinking: bool | None = None,
        thinking_effort: str = "",
        expected_position: int | None = None,
        expected_head_hash: bytes = b"",
        durability: str = "",
        request_id: str | None = None,
        timeout_s: float = LONG_DEADLINE_SECONDS,
    ) -> pb.AppendResponse:
        """Append one of token ids, text and chat messages; durable when it returns. `thinking` and `thinking_effort`
        ("low", "high", "max") go with messages, and None and "" are the model's own way."""
        request = append_request(tokens, text, messages, add_generation_prompt, thinking, thinking_effort)
        request.name = self.name
        request.request_id = request_id or fresh_request_id()
        request.expected_head_hash = expected_head_hash
        if expected_position is not None:
            request.expected_position = expected_position
        if durability:
            request.durability = common_pb2.Durability.Value(durability)
        if not is_large(request):
            return await self._wire.unary(lambda c: c.sessions.Append, request, self.name, timeout_s)
        return await self._wire.call(
            lambda c, left_s: c.sessions.UploadAppend(chunks(request), timeout=left_s, metadata=c.metadata),
            self.name,
            timeout_s,
        )

    def generate(
        self,
        *,
        tokens: Sequence[int] | None = None,
        text: str | bytes | None = None,
        messages: Messages | None = None,
        add_generation_prompt: bool = False,
        thinking: bool | None = None,
        thinking_effort: str = "",
        max_tokens: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float | None = None,
        min_p: float = 0.0,
        seed: int | None = None,
        stop_text: Sequence[str | bytes] = (),
        stop_ids: Sequence[int] = (),
        logprobs: bool = False,
        expected_position: int | None = None,
        resume_position: int | None = None,
        cancel_on_disconnect: bool = False,
        request_id: str | None = None,
        patience_s: float | None = None,
    ) -> Generation:
        """Start a generation, or attach to the one that `request_id` names; iterate over the result. An input is
        appended first. The stream outlives a restart of its server for up to `patience_s` without a message."""
        request = pb.GenerateRequest(
            name=self.name,
            request_id=request_id or fresh_request_id(),
            max_tokens=max_tokens,
            sampling=common_pb2.Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed),
            stop_text=[utf8(stop) for stop in stop_text],
            stop_ids=stop_ids,
            logprobs=logprobs,
            expected_position=expected_position,
            resume_position=resume_position,
            cancel_on_disconnect=cancel_on_disconnect,
        )
        given = append_request(tokens, text, messages, add_generation_prompt, thinking, thinking_effort)
        if given.WhichOneof("input") is not None:
            request.input.CopyFrom(given)
        patience = self._patience if patience_s is None else replace(self._patience, total_s=patience_s)
        return Generation(self._wire, request, patience)

    async def cancel_generation(self) -> session_pb2.Session:
        """End the running generation, if any, at a token border."""
        request = pb.CancelGenerationRequest(name=self.name)
        return await self._wire.unary(lambda c: c.sessions.CancelGeneration, request, self.name)

    def tokens(self, start: int = 0, end: int | None = None, *, follow: bool = False) -> TokenReader:
        """Committed tokens from `start` to `end` (None: the head as it is now); iterate over the result."""
        request = pb.ReadTokensRequest(name=self.name, start=start, end=end, follow=follow)
        return TokenReader(self._wire, request, self._patience)

    async def fork(
        self,
        count: int = 1,
        *,
        position: int | None = None,
        session_ids: Sequence[str] = (),
        seed_policy: str = "",
        transient: bool = False,
        ttl_s: float | None = None,
        request_id: str | None = None,
    ) -> "list[Session]":
        """`count` children, or one for each id, at `position` (None: the head). `seed_policy`: "", "inherit" or
        "derive"."""
        request = pb.ForkRequest(
            name=self.name,
            request_id=request_id or fresh_request_id(),
            position=position,
            count=len(session_ids) or count,
            session_ids=session_ids,
            seed_policy=SEED_POLICIES[seed_policy],
            transient=transient,
            ttl=None if ttl_s is None else _duration(ttl_s),
        )
        answer = await self._wire.unary(lambda c: c.sessions.Fork, request, self.name)
        return [Session(self._wire, child.name, self._patience) for child in answer.sessions]

    async def rewind(self, position: int, *, request_id: str | None = None) -> session_pb2.Session:
        """Go back to `position`: the name points at a new branch."""
        request = pb.RewindRequest(name=self.name, position=position, request_id=request_id or fresh_request_id())
        return await self._wire.unary(lambda c: c.sessions.Rewind, request, self.name)

    async def pause(self, *, request_id: str | None = None) -> session_pb2.Session:
        """Checkpoint, free the node's memory, give up ownership."""
        request = pb.PauseRequest(name=self.name, request_id=request_id or fresh_request_id())
        return await self._wire.unary(lambda c: c.sessions.Pause, request, self.name, LONG_DEADLINE_SECONDS)

    async def resume(self, *, request_id: str | None = None) -> pb.ResumeResponse:
        """Let a node take and restore the session: where placement has it, or with `direct` the one that is asked."""
        request = pb.ResumeRequest(name=self.name, request_id=request_id or fresh_request_id())
        return await self._wire.unary(lambda c: c.sessions.Resume, request, self.name, LONG_DEADLINE_SECONDS)

    async def checkpoint(
        self, checkpoint_id: str = "", *, ttl_s: float | None = None, request_id: str | None = None
    ) -> checkpoint_pb2.Checkpoint:
        """Take a checkpoint at the head; durable when it returns. It is kept until it is deleted, or for `ttl_s`."""
        request = checkpoint_pb2.CreateCheckpointRequest(
            parent=self.name, checkpoint_id=checkpoint_id, request_id=request_id or fresh_request_id()
        )
        if ttl_s is not None:
            request.ttl.CopyFrom(_duration(ttl_s))
        return await self._wire.unary(
            lambda c: c.checkpoints.CreateCheckpoint, request, self.name, LONG_DEADLINE_SECONDS
        )

    async def update(
        self,
        *,
        labels: Mapping[str, str] | None = None,
        every_tokens: int | None = None,
        on_turn_end: bool | None = None,
        keep_last: int | None = None,
        ttl_s: float | None = None,
        standbys: int | None = None,
        etag: str = "",
    ) -> session_pb2.Session:
        """Change what is given; `etag` refuses the change when the session changed since it was read. `standbys`: nodes
        that follow the session, ready to go on when its owner dies."""
        session = session_pb2.Session(name=self.name, etag=etag, labels=labels or {})
        paths = ["labels"] if labels is not None else []
        if every_tokens is not None:
            session.checkpoint_policy.every_tokens = every_tokens
            paths.append("checkpoint_policy.every_tokens")
        if on_turn_end is not None:
            session.checkpoint_policy.on_turn_end = on_turn_end
            paths.append("checkpoint_policy.on_turn_end")
        if keep_last is not None:
            session.checkpoint_policy.keep_last = keep_last
            paths.append("checkpoint_policy.keep_last")
        if ttl_s is not None:
            session.ttl.CopyFrom(_duration(ttl_s))
            paths.append("ttl")
        if standbys is not None:
            session.standbys = standbys
            paths.append("standbys")
        request = pb.UpdateSessionRequest(session=session, update_mask=FieldMask(paths=paths))
        return await self._wire.unary(lambda c: c.sessions.UpdateSession, request, self.name)

    async def delete(self, *, request_id: str | None = None) -> session_pb2.Session:
        """Hide the session; descendants live on."""
        request = pb.DeleteSessionRequest(name=self.name, request_id=request_id or fresh_request_id())
        return await self._wire.unary(lambda c: c.sessions.DeleteSession, request, self.name)

    async def undelete(self) -> session_pb2.Session:
        """Bring a deleted session back, paused."""
        request = pb.UndeleteSessionRequest(name=self.name)
        return await self._wire.unary(lambda c: c.sessions.UndeleteSession, request, self.name)

    def migrate(self, to: str = "") -> Events[admin_pb2.MigrateProgress]:
        """Move the session to the node `to` (an id or `nodes/{n}`; "": the one with the most room) while it runs.
        Streams of its tokens go on. The last event has the session; cancelling leaves it where it is."""
        request = admin_pb2.MigrateSessionRequest(name=self.name, target_node=node_name(to) if to else "")
        return Events(self._wire.stream(lambda c: c.admin.MigrateSession(request, metadata=c.metadata), self.name))

    async def release_quarantine(self, *, request_id: str | None = None) -> session_pb2.Session:
        """Let a quarantined session take calls again; its generation goes on."""
        request = admin_pb2.ReleaseQuarantineRequest(name=self.name, request_id=request_id or fresh_request_id())
        return await self._wire.unary(lambda c: c.admin.ReleaseQuarantine, request, self.name)

    def export(self) -> AsyncGenerator[export_pb2.ExportChunk, None]:
        """The session outside a store: chunks for a file (client/frames.py) or an import."""
        request = pb.ExportRequest(name=self.name)
        return self._wire.stream(lambda c: c.sessions.Export(request, metadata=c.metadata), self.name)


class Sessions:
    """All sessions of the service."""

    def __init__(self, wire: Wire, patience: Patience) -> None:
        self._wire = wire
        self._patience = patience

    def open(self, name: str) -> Session:
        """The session of that name, unread."""
        return Session(self._wire, name, self._patience)

    async def create(
        self,
        workflow: str,
        session_id: str = "",
        *,
        seed: int | None = None,
        every_tokens: int | None = None,
        on_turn_end: bool = False,
        keep_last: int = 0,
        labels: Mapping[str, str] | None = None,
        transient: bool = False,
        ttl_s: float | None = None,
        standbys: int = 0,
        request_id: str | None = None,
    ) -> Session:
        """A new, empty session in `workflow` (an id or `workflows/{w}`). `standbys`: nodes that follow it, ready to go
        on when its owner dies. `every_tokens` None, `keep_last` and `standbys` 0: the server's and the workflow's
        defaults."""
        session = session_pb2.Session(labels=labels or {}, transient=transient, standbys=standbys)
        if every_tokens is not None or on_turn_end or keep_last:
            session.checkpoint_policy.on_turn_end = on_turn_end
            session.checkpoint_policy.keep_last = keep_last
            if every_tokens is not None:
                session.checkpoint_policy.every_tokens = every_tokens
        if ttl_s is not None:
            session.ttl.CopyFrom(_duration(ttl_s))
        request = pb.CreateSessionRequest(
            parent=workflow_name(workflow),
            session_id=session_id,
            session=session,
            request_id=request_id or fresh_request_id(),
            seed=seed,
        )
        return self.open((await self._wire.unary(lambda c: c.sessions.CreateSession, request)).name)

    async def list(self, workflow: str = "-", *, show_deleted: bool = False) -> AsyncIterator[session_pb2.Session]:
        """All sessions of a workflow ("-": of all), ascending by name."""
        request = pb.ListSessionsRequest(parent=workflow_name(workflow), show_deleted=show_deleted)
        while True:
            page = await self._wire.unary(lambda c: c.sessions.ListSessions, request)
            for session in page.sessions:
                yield session
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def import_(
        self,
        workflow: str,
        chunks: AsyncIterator[export_pb2.ExportChunk],
        session_id: str = "",
        *,
        request_id: str | None = None,
    ) -> Session:
        """A new session from the chunks of an export."""
        target = export_pb2.ImportTarget(
            parent=workflow_name(workflow), session_id=session_id, request_id=request_id or fresh_request_id()
        )

        begun = False

        async def stream() -> AsyncIterator[export_pb2.ExportChunk]:
            nonlocal begun
            yield export_pb2.ExportChunk(target=target)
            begun = True
            async for chunk in chunks:
                yield chunk

        async def send(connection: Connection, left_s: float) -> session_pb2.Session:
            try:
                return await connection.sessions.Import(stream(), timeout=left_s, metadata=connection.metadata)
            except grpc.aio.AioRpcError as failure:
                if begun:  # the chunks are gone, so there is nothing to send again
                    raise remote_error(failure) from None
                raise

        return self.open((await self._wire.call(send)).name)


def workflow_name(workflow: str) -> str:
    """The resource name of a workflow that was given by id or name."""
    return workflow if workflow.startswith("workflows/") else f"workflows/{workflow}"


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(round(seconds * 1000))
    return duration
