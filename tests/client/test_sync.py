"""The blocking client against a real server: everything the asynchronous one does, from any thread, and a clean end."""

import asyncio
import concurrent.futures
import gc
import inspect
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from forkpoint.client import client as aio
from forkpoint.client import events, generation, nodes, session, sync
from forkpoint.client.background import THREAD_NAME, Background, Hold, _told
from forkpoint.client.blocking import Events
from forkpoint.client.errors import ClientClosedError, RemoteError
from forkpoint.client.frames import frame, read_frames
from forkpoint.client.resume import Patience
from forkpoint.client.sync import Client
from forkpoint.client.wire import Wire
from forkpoint.proto.forkpoint.v1 import session_pb2
from forkpoint.server.engine.batch import Sample
from tests.support.hash_engine import continuation
from tests.support.rpc_site import ROOT, ServerProcess, server_process

GREEDY = Sample(0.0, 0, 1.0, 0.0, 0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server in a process of its own: one in this thread's loop could answer nobody who blocks it."""
    with server_process(tmp_path_factory.mktemp("sync"), step_pause=0.001) as running:
        with Client(running.address) as client:
            client.ready()
            client.workflows.create("w")
        yield running


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(server.address) as connected:
        yield connected
    assert not own_threads(), "the thread ends with the last client"


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD_NAME]


@pytest.mark.parametrize(
    ("twin", "original"),
    [
        (sync.Client, aio.Client),
        (sync.Workflows, aio.Workflows),
        (sync.Checkpoints, aio.Checkpoints),
        (sync.Garbage, aio.Garbage),
        (sync.Nodes, nodes.Nodes),
        (sync.Sessions, session.Sessions),
        (sync.Session, session.Session),
        (sync.Generation, generation.Generation),
        (sync.TokenReader, generation.TokenReader),
        (Events, events.Events),
    ],
)
def test_a_twin_has_every_method_of_its_original_with_the_same_parameters(twin: Any, original: Any) -> None:
    for name, method in vars(original).items():
        if name.startswith("_"):
            continue
        own = getattr(twin, name)
        if not isinstance(method, property):
            assert list(inspect.signature(own).parameters) == list(inspect.signature(method).parameters), name
            assert own.__doc__, name
        assert not inspect.iscoroutinefunction(own), name


def test_the_attributes_of_a_twin_are_those_of_its_original() -> None:
    inner = session.Sessions(Wire(["127.0.0.1:1"]), Patience()).open("workflows/w/sessions/s")
    for one, twin in ((inner.generate(), sync.Generation), (inner.tokens(), sync.TokenReader)):
        for name in vars(one):
            assert name.startswith("_") or isinstance(vars(twin)[name], property), name


def test_a_session_lives_through_everything(client: Client, server: ServerProcess) -> None:
    parent = client.sessions.create("w", "all", seed=7, labels={"a": "b"})
    assert repr(parent) == "Session('workflows/w/sessions/all')"
    assert parent.append(text="hello").head == 5
    said = parent.generate(max_tokens=20, logprobs=True)
    chunks = list(said)
    assert [token for chunk in chunks for token in chunk.token_ids] == said.token_ids
    assert said.token_ids == continuation(b"hello", 20, GREEDY)[0]
    assert said.text == bytes(said.token_ids) and len(said.logprobs) == 20 and said.position == 25
    assert said.finished is not None and said.finished.head == 25 and said.started is not None
    assert (said.reconnects, list(said)) == ([], [])
    left, right = parent.fork(2, position=5)
    assert left.generate(max_tokens=20).result().token_ids == right.generate(max_tokens=20).result().token_ids
    assert parent.update(labels={"a": "c"}).labels == {"a": "c"}
    checkpoint = parent.checkpoint("here")
    assert client.checkpoints.verify(checkpoint.name).result().result.parts_checked == len(checkpoint.parts)
    assert [c.name for c in client.checkpoints.list(parent.name)][-1] == checkpoint.name
    assert parent.rewind(6).head == 6 and parent.tokens().result().text == b"hello" + said.text[:1]
    assert parent.pause().state == session_pb2.Session.PAUSED
    assert parent.resume().exact
    assert parent.delete().state == session_pb2.Session.DELETED and parent.undelete().name == parent.name
    assert {s.name for s in client.sessions.list("w")} >= {parent.name, left.name, right.name}
    assert [w.name for w in client.workflows.list()] == ["workflows/w"]
    assert client.workflows.usage("w").generated_tokens > 0
    assert [node.address for node in client.nodes.list()] == [server.address]
    assert client.garbage.collect(dry_run=True).result().done


def test_an_error_is_the_callers_with_its_facts(client: Client) -> None:
    with pytest.raises(RemoteError) as error:
        client.sessions.open("workflows/w/sessions/nobody").get()
    assert (error.value.code, error.value.metadata["resource"]) == ("NOT_FOUND", "workflows/w/sessions/nobody")
    with pytest.raises(TypeError, match="txt"):
        client.sessions.open("workflows/w/sessions/nobody").append(txt="x")  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="address"):
        Client([])


def test_an_export_is_imported_while_it_is_read(client: Client) -> None:
    parent = client.sessions.create("w", "out", seed=7)
    parent.append(text="hello")
    copy = client.sessions.import_("w", parent.export(), "in")
    assert copy.tokens().result().text == b"hello"
    file = io.BytesIO(b"".join(frame(chunk) for chunk in copy.export()))
    assert client.sessions.import_("w", read_frames(file), "from-file").get().head == 5


def test_threads_share_a_client(client: Client) -> None:
    def talk(number: int) -> list[int]:
        own = client.sessions.create("w", f"thread-{number}", seed=7)
        own.append(text=f"hello {number}")
        return own.generate(max_tokens=30).result().token_ids

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        said = list(pool.map(talk, range(16)))
    assert said == [continuation(f"hello {number}".encode(), 30, GREEDY)[0] for number in range(16)]
    assert len(own_threads()) == 1


def test_threads_share_a_stream_and_each_chunk_goes_to_one(client: Client) -> None:
    own = client.sessions.create("w", "shared", seed=7)
    own.append(text="hello")
    said = own.generate(max_tokens=200)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        parts = [chunk for chunks in pool.map(lambda one: list(one), [said] * 4) for chunk in chunks]
    parts.sort(key=lambda chunk: chunk.start)
    assert [token for chunk in parts for token in chunk.token_ids] == said.token_ids
    assert said.token_ids == continuation(b"hello", 200, GREEDY)[0]


async def test_it_works_beside_an_event_loop_and_inside_one(server: ServerProcess) -> None:
    with Client(server.address) as client:
        own = client.sessions.create("w", "beside", seed=7)
        own.append(text="hello")
        async with aio.Client(server.address) as other:
            both = await asyncio.gather(
                other.sessions.open(own.name).generate(max_tokens=50, request_id="g").result(),
                asyncio.to_thread(own.generate(max_tokens=50, request_id="g").result),
            )
        assert both[0].token_ids == both[1].token_ids == continuation(b"hello", 50, GREEDY)[0]


def test_a_waiting_call_ends_when_another_thread_closes_the_client(server: ServerProcess) -> None:
    client = Client(server.address)
    own = client.sessions.create("w", "closed", seed=7)
    own.append(text="hello")
    reader = own.tokens(follow=True)
    assert next(reader).start == 0
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(next, reader)
        client.close()
        with pytest.raises(ClientClosedError):
            waiting.result(20)
    client.close()
    with pytest.raises(ClientClosedError):
        own.get()
    assert not own_threads()


def test_a_wait_is_interrupted_by_the_keyboard(client: Client) -> None:
    own = client.sessions.create("w", "interrupted", seed=7)
    own.append(text="hello")
    reader = own.tokens(follow=True)
    assert next(reader).start == 0
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        next(reader)
    own.append(text="!")
    assert next(reader).start == 5, "the client and the stream are as good as before"


def test_what_comes_of_a_client_keeps_it_open_and_the_last_of_it_closes_it(server: ServerProcess) -> None:
    own = Client(server.address).sessions.create("w", "kept", seed=7)
    gc.collect()
    (thread,) = own_threads()
    assert own.append(text="hello").head == 5
    reader = own.tokens(follow=True)
    assert next(reader).start == 0
    del own, reader
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()


def test_the_loops_own_thread_is_refused_a_wait_for_itself() -> None:
    background = Background()
    closed = threading.Event()

    async def closing() -> None:
        closed.set()

    async def nothing() -> None:
        return

    async def inside() -> None:
        hold.run(nothing())

    hold = Hold(closing, background)
    with pytest.raises(RuntimeError, match="own thread"):
        hold.run(inside())
    hold.release()
    hold.release()
    assert closed.is_set() and not own_threads()
    with pytest.raises(ClientClosedError):
        hold.run(nothing())
    hold.start(nothing())


def test_a_loop_that_grpc_wakes_for_nothing_says_nothing_and_other_errors_are_told() -> None:
    told: list[dict[str, Any]] = []
    loop: Any = type("Loop", (), {"default_exception_handler": staticmethod(told.append)})()
    _told(loop, {"message": "woken", "exception": BlockingIOError(11, "not now")})
    _told(loop, {"message": "broken", "exception": ValueError("x")})
    _told(loop, {"message": "odd"})
    assert [event["message"] for event in told] == ["broken", "odd"]


CARELESS = """
import contextlib, sys, threading
from forkpoint.client.errors import ClientClosedError
from forkpoint.client.sync import Client

def wait():
    with contextlib.suppress(ClientClosedError):  # which is what the end of the program is to a thread that lives on
        list(reader)

client = Client(sys.argv[1])
session = client.sessions.create("w", sys.argv[2], seed=7)
session.append(text="hello")
reader = session.tokens(follow=True)
print(len(next(reader).token_ids), flush=True)
waiting = threading.Thread(target=wait, daemon=True)
waiting.start()
"""


@pytest.mark.parametrize("end", ["", "del client, session"])
def test_a_program_that_closes_nothing_ends_without_a_word(server: ServerProcess, end: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", CARELESS + end, server.address, f"careless-{len(end)}"],
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "5\n"), result.stderr
    assert "Traceback" not in result.stderr, result.stderr
