"""Which calls the client sends again, and where: only what is UNAVAILABLE, and each is one call."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from forkpoint.client.client import Client
from forkpoint.client.errors import ClientClosedError, RemoteError
from forkpoint.client.resume import ANSWERED_SECONDS, Patience, resumed
from forkpoint.client.wire import DIRECT_METADATA, Wire
from forkpoint.proto.forkpoint.v1 import admin_pb2, session_pb2
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.server.rpc.routes import DIRECT
from tests.support.fake_node import Answer, FakeNode, Refused, Silence, fake_node
from tests.support.rpc_site import ROOT

NAME = "workflows/w/sessions/s"
SESSION = session_pb2.Session(name=NAME, head=5)
GONE = Refused(grpc.StatusCode.UNAVAILABLE, "NODE_DRAINING")
RELOCATING = "SESSION_RELOCATING"


def node(name: str, **fields: Any) -> admin_pb2.Node:
    return admin_pb2.Node(name=f"nodes/{name}", incarnation=f"{name}-1", **fields)


async def release(client: Client) -> session_pb2.Session:
    return await client.sessions.open(NAME).release_quarantine()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (grpc.StatusCode.ABORTED, "SESSION_BUSY"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "NODE_CAPACITY"),
        (grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH"),
        (grpc.StatusCode.DATA_LOSS, "LOG_TAIL_MISSING"),
        (grpc.StatusCode.INTERNAL, "INTERNAL"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ""),
        (grpc.StatusCode.UNKNOWN, ""),
    ],
)
async def test_what_is_not_marked_retryable_is_sent_once(code: grpc.StatusCode, reason: str) -> None:
    async with fake_node(
        ReleaseQuarantine=[[Refused(code, reason)]], MigrateSession=[[Refused(code, reason)]]
    ) as first:
        async with (
            fake_node(ReleaseQuarantine=[[SESSION]]) as second,
            Client([first.address, second.address]) as client,
        ):
            with pytest.raises(RemoteError) as error:
                await release(client)
            assert (error.value.code, error.value.reason) == (code.name, reason)
            with pytest.raises(RemoteError):
                await client.sessions.open(NAME).migrate().result()
        assert first.methods() == ["ReleaseQuarantine", "MigrateSession"]
        assert second.calls == []


@pytest.mark.parametrize("refused", [GONE, Refused(grpc.StatusCode.CANCELLED, "")], ids=["it says so", "it stops"])
async def test_what_is_unavailable_is_the_same_call_at_the_next_address(refused: Refused) -> None:
    async with fake_node(ReleaseQuarantine=[[refused]]) as first, fake_node(ReleaseQuarantine=[[SESSION]]) as second:
        async with Client([first.address, second.address]) as client:
            assert (await release(client)).head == 5
            assert (await release(client)).head == 5
        requests = [request.request_id for _, request, _ in (*first.calls, *second.calls)]
        assert len(first.calls) == 1, "the second call goes where the first one was answered"
        assert len(requests) == 3 and len(set(requests)) == 2


async def test_every_address_is_tried_once_and_then_the_error_is_the_callers() -> None:
    async with fake_node(UndrainNode=[[GONE]]) as first, fake_node(UndrainNode=[[GONE]]) as second:
        async with Client([first.address, "127.0.0.1:1", second.address]) as client:
            with pytest.raises(RemoteError) as error:
                await client.nodes.undrain("a")
        assert error.value.reason == "NODE_DRAINING"
        assert len(first.calls) == len(second.calls) == 1


async def test_the_deadline_is_for_all_tries_together() -> None:
    slow, undrained = Silence(), admin_pb2.Node(name="nodes/a")
    async with fake_node(UndrainNode=[[slow, GONE]]) as first, fake_node(UndrainNode=[[undrained]]) as second:
        wire = Wire([first.address, second.address])
        request = admin_pb2.UndrainNodeRequest(name="nodes/a")
        call = asyncio.create_task(  # owner: awaited below
            wire.unary(lambda c: c.admin.UndrainNode, request, "", 100.0)
        )
        await asyncio.sleep(0.3)
        slow.over.set()
        assert (await call).name == "nodes/a"
        assert second.left_s[0] is not None and second.left_s[0] <= 99.7
        await wire.close()


async def test_a_direct_client_asks_not_to_be_forwarded_and_goes_to_the_owner() -> None:
    async with fake_node(GetSession=[[SESSION]], ListNodes=[[admin_pb2.ListNodesResponse()]]) as owner:
        told = Refused(grpc.StatusCode.UNAVAILABLE, RELOCATING, address=owner.address)
        async with fake_node(GetSession=[[told]], MigrateSession=[[told]], Generate=[[told]]) as asked:
            owner.script |= {"MigrateSession": [[admin_pb2.MigrateProgress(session=SESSION)]]}
            owner.script |= {"Generate": [[pb.GenerateResponse(finished=pb.Finished(head=5))]]}
            for direct in (True, False):
                async with Client(asked.address, direct=direct) as client:
                    session = client.sessions.open(NAME)
                    assert (await session.get()).head == (await session.get()).head == 5
                    assert (await client.sessions.open(NAME).migrate("b").result()).session.head == 5
                    assert (await client.sessions.open(NAME).generate().result()).finished is not None
            directs = [metadata.get("forkpoint-direct") for _, _, metadata in (*asked.calls, *owner.calls)]
            assert asked.methods() == ["GetSession"] * 2, "the session's other calls go straight to its owner"
            assert directs == ["1", None, "1", "1", "1", "1", None, None, None, None]


async def test_a_long_call_is_sent_again_until_its_first_event_and_not_after() -> None:
    begun = admin_pb2.DrainProgress(sessions_left=3)
    async with (
        fake_node(DrainNode=[[GONE], [begun, GONE]]) as first,
        fake_node(DrainNode=[[begun, admin_pb2.DrainProgress()]]) as second,
    ):
        async with Client([first.address, second.address]) as client:
            assert [event.sessions_left async for event in client.nodes.drain("a")] == [3, 0]
        async with Client([first.address, second.address]) as client:
            events = client.nodes.drain("nodes/a")
            assert (await anext(events)).sessions_left == 3
            with pytest.raises(RemoteError, match="NODE_DRAINING"):
                await events.result()
            assert events.last == begun
        assert [request.name for _, request, _ in (*first.calls, *second.calls)] == ["nodes/a"] * 3


def test_client_and_server_mean_the_same_by_direct() -> None:
    assert [DIRECT_METADATA] == [((DIRECT, "1"),)]


async def gone_from(fake: FakeNode, method: str) -> None:
    """Wait until the node has noticed that the call's client left."""
    async with asyncio.timeout(10):
        while method not in fake.ended:
            await asyncio.sleep(0.01)


async def test_leaving_a_long_call_cancels_it_at_the_node() -> None:
    event = admin_pb2.MigrateProgress(lag_tokens=9)
    script: dict[str, Sequence[Answer]] = {"MigrateSession": [[event, Silence()]], "Rebalance": [[Silence()]]}
    async with fake_node(**script) as fake, Client(fake.address) as client:
        async with client.sessions.open(NAME).migrate() as events:
            assert (await anext(events)).lag_tokens == 9
        await gone_from(fake, "MigrateSession")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.nodes.rebalance().result()
        await gone_from(fake, "Rebalance")


async def test_an_empty_answer_of_a_long_call_is_an_error() -> None:
    async with fake_node(MigrateSession=[[]]) as fake, Client(fake.address) as client:
        with pytest.raises(RemoteError, match="without an answer"):
            await client.sessions.open(NAME).migrate().result()


async def test_a_watch_goes_on_elsewhere_and_tells_what_it_missed_and_nothing_twice() -> None:
    def told(*nodes: admin_pb2.Node) -> list[admin_pb2.NodeEvent]:
        return [admin_pb2.NodeEvent(node=node) for node in nodes]

    first_events = [*told(node("a", sessions=1), node("b")), *told(node("a", sessions=1, lease_counter=7))]
    left = admin_pb2.ListNodesResponse(nodes=[node("a", sessions=2)])
    second_events = [*told(node("a", sessions=1, lease_counter=9), node("a", sessions=2), node("c"))]
    missed = admin_pb2.NodeEvent(node=node("z"), gone=True)
    async with (
        fake_node(WatchNodes=[[*first_events, GONE]]) as first,
        fake_node(WatchNodes=[[*second_events, missed, Silence()]], ListNodes=[[left]]) as second,
        Client([first.address, second.address]) as client,
    ):
        async with client.nodes.watch() as events:
            seen = [await anext(events) for _ in range(5)]
        await gone_from(second, "WatchNodes")
    assert [(e.node.name, e.node.sessions, e.gone) for e in seen] == [
        ("nodes/a", 1, False),
        ("nodes/b", 0, False),
        ("nodes/b", 0, True),
        ("nodes/a", 2, False),
        ("nodes/c", 0, False),
    ]


class Standing:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def wall_us(self) -> int:
        return 0


async def test_a_follower_that_heard_nothing_for_long_is_as_patient_as_one_that_did() -> None:
    quiet, silence, clock = [pb.TokenChunk(start=0, token_ids=[1])], Silence(), Standing()
    async with fake_node(ReadTokens=[[*quiet, silence, GONE], [GONE], quiet]) as fake:
        wire = Wire([fake.address])
        errors: list[RemoteError] = []
        messages = resumed(
            wire,
            lambda c: c.sessions.ReadTokens(pb.ReadTokensRequest(name=NAME)),  # type: ignore[arg-type, return-value]
            NAME,
            Patience(60.0, None, clock),
            errors.append,
        )
        assert (await anext(messages)).start == 0
        clock.now = 10 * ANSWERED_SECONDS
        silence.over.set()
        assert (await anext(messages)).start == 0
        assert [error.reason for error in errors] == ["NODE_DRAINING"] * 2
        await messages.aclose()
        await wire.close()


async def test_closing_a_client_ends_what_waits_for_it() -> None:
    silent = [[Silence()]]
    async with fake_node(UndrainNode=silent, DrainNode=silent, Generate=silent) as fake:
        client = Client(fake.address)
        session = client.sessions.open(NAME)
        waiting = [
            asyncio.create_task(client.nodes.undrain("a")),  # owner: gathered below, as the next two
            asyncio.create_task(client.nodes.drain("a").result()),  # owner: as above
            asyncio.create_task(session.generate().result()),  # owner: as above
        ]
        async with asyncio.timeout(10):
            while len(fake.calls) < 3:
                await asyncio.sleep(0.01)
        await client.close()
        await client.close()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in results] == [ClientClosedError] * 3
        with pytest.raises(ClientClosedError):
            await session.get()


async def test_a_task_that_is_cancelled_is_cancelled() -> None:
    async with fake_node(UndrainNode=[[Silence()]]) as fake, Client(fake.address) as client:
        task = asyncio.create_task(client.nodes.undrain("a"))  # owner: awaited below
        async with asyncio.timeout(10):
            while not fake.calls:
                await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_import_goes_elsewhere_while_none_of_its_chunks_is_gone() -> None:
    taken = []

    async def chunks() -> Any:
        taken.append(1)
        yield pb.AppendChunk()

    async with Client(["127.0.0.1:1", "127.0.0.1:2"]) as client:
        with pytest.raises(RemoteError) as error:
            await client.sessions.import_("w", chunks())
    assert error.value.code == "UNAVAILABLE" and "127.0.0.1:2" in error.value.message
    assert taken == []


FORKING = """
import asyncio, os, sys
from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.forked import ForkedProcessError
from forkpoint.client.sync import Client as Blocking

with Blocking("127.0.0.1:1") as before:
    try:
        before.nodes.get("a")
    except RemoteError as error:
        print(error.code, flush=True)
    child = os.fork()
    if child == 0:
        for call in (lambda: before.nodes.get("a"), lambda: Blocking("127.0.0.1:1"),
                     lambda: asyncio.run(Client("127.0.0.1:1").nodes.get("a"))):
            try:
                call()
            except ForkedProcessError as error:
                print(error.parent == os.getppid(), flush=True)
    else:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_a_forked_process_is_refused_calls_that_would_never_return(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", FORKING],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.stdout.split() == ["UNAVAILABLE", "True", "True", "True", "0"], result.stderr
    assert "Traceback" not in result.stderr
