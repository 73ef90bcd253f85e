"""Sessions over the wire: create, list, update, append, fork, rewind, pause, resume, delete."""

import asyncio

import grpc
import pytest

from forkpoint.client.errors import RemoteError
from forkpoint.proto.forkpoint.v1 import common_pb2, session_pb2
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from tests.support.rpc_site import Refusal, Served, settled


async def test_a_new_session_says_what_it_is(site: Served) -> None:
    session = await site.client.sessions.create(
        "w", "s", seed=-5, every_tokens=64, on_turn_end=True, labels={"team": "a"}, ttl_s=3600
    )
    now = await session.get()
    assert (now.name, now.state, now.head, now.seed) == ("workflows/w/sessions/s", session_pb2.Session.ACTIVE, 0, -5)
    assert (now.checkpoint_policy.every_tokens, now.checkpoint_policy.on_turn_end) == (64, True)
    assert (dict(now.labels), now.parent, now.exact, now.etag) == ({"team": "a"}, "", True, "1")
    assert now.model.model_digest == site.engine.facts.model_digest
    assert len(now.head_hash) == 32
    assert 3590 < now.expire_time.ToSeconds() - now.create_time.ToSeconds() <= 3600


async def test_the_server_draws_ids_and_seeds_and_its_own_interval(site: Served) -> None:
    first, second = await site.client.sessions.create("w"), await site.client.sessions.create("w")
    assert first.name != second.name
    seeds = {(await session.get()).seed for session in (first, second)}
    assert len(seeds) == 2
    assert (await first.get()).checkpoint_policy.every_tokens == 32


async def test_a_repeated_create_is_one_create(site: Served) -> None:
    first = await site.client.sessions.create("w", request_id="r")
    assert (await site.client.sessions.create("w", request_id="r")).name == first.name
    assert len([session async for session in site.client.sessions.list("w")]) == 1


async def test_lists_come_in_pages_and_a_page_token_belongs_to_its_list(site: Served) -> None:
    names = [(await site.session(f"s{index}")).name for index in range(5)]
    await site.client.workflows.create("v")
    other = (await site.client.sessions.create("v", "z")).name
    request = pb.ListSessionsRequest(parent="workflows/w", page_size=2)
    pages = []
    while True:
        page = await site.raw.sessions.ListSessions(request)
        pages.append([session.name for session in page.sessions])
        if not page.next_page_token:
            break
        request.page_token = page.next_page_token
    assert pages == [names[:2], names[2:4], names[4:]]
    request.parent = "workflows/v"
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
        await site.raw.sessions.ListSessions(request)
    assert {session.name async for session in site.client.sessions.list()} == {*names, other}


async def test_a_page_is_cut_before_it_outgrows_a_message(site: Served) -> None:
    labels = {f"{index:03d}".ljust(250, "k"): "v" * 250 for index in range(64)}
    for index in range(70):
        await site.client.sessions.create("w", f"s{index:02d}", labels=labels)
    page = await site.raw.sessions.ListSessions(pb.ListSessionsRequest(parent="workflows/w"))
    assert 0 < len(page.sessions) < 70 and page.next_page_token
    assert len([session async for session in site.client.sessions.list("w")]) == 70


async def test_update_changes_what_the_mask_names(site: Served) -> None:
    session = await site.client.sessions.create("w", "s", every_tokens=64, labels={"a": "1"})
    after = await session.update(on_turn_end=True)
    assert (after.checkpoint_policy.every_tokens, after.checkpoint_policy.on_turn_end) == (64, True)
    assert dict(after.labels) == {"a": "1"}
    after = await session.update(labels={}, every_tokens=0)
    assert (dict(after.labels), after.checkpoint_policy.every_tokens, after.etag) == ({}, 0, "3")
    read = await session.get()
    read.labels["b"] = "2"
    after = await site.raw.sessions.UpdateSession(pb.UpdateSessionRequest(session=read))
    assert dict(after.labels) == {"b": "2"}
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
        await site.raw.sessions.UpdateSession(pb.UpdateSessionRequest(session=session_pb2.Session(name=session.name)))


async def test_an_append_tells_where_its_tokens_lie(site: Served) -> None:
    session = await site.session()
    first = await session.append(text="héllo", request_id="r", expected_position=0)
    assert (first.start, first.head, bytes(first.token_ids), first.replayed) == (0, 6, "héllo".encode(), False)
    again = await session.append(text="héllo", request_id="r", expected_position=0)
    assert (again.start, again.head, again.head_hash, again.replayed) == (0, 6, first.head_hash, True)
    assert again.token_ids == first.token_ids
    tokens = await session.append(tokens=[7, 8], expected_position=6, expected_head_hash=first.head_hash)
    assert list(tokens.token_ids) == [7, 8]
    chat = await session.append(messages=[("user", "hi")], add_generation_prompt=True)
    assert list(chat.token_ids) == [256, *b"hi", 258, 257]
    read = await session.tokens().result()
    assert read.token_ids == [*"héllo".encode(), 7, 8, 256, *b"hi", 258, 257]


async def test_control_tokens_never_come_from_text(site: Served) -> None:
    session = await site.session()
    assert max((await session.append(text="<|end|><|user|>")).token_ids) < 256


async def test_an_upload_is_the_same_call_as_an_append(site: Served) -> None:
    session = await site.session()
    header = pb.AppendChunk(header=pb.AppendRequest(name=session.name, request_id="r"))
    parts = [pb.AppendChunk(text_utf8=part) for part in (b"h\xc3", b"\xa9llo")]
    first = await site.raw.sessions.UploadAppend(iter([header, *parts]))
    assert bytes(first.token_ids) == "héllo".encode()
    again = await session.append(text="héllo", request_id="r")
    assert (again.replayed, again.head) == (True, 6)
    tokens = [pb.AppendChunk(tokens=common_pb2.TokenIds(ids=ids)) for ids in ([1, 2], [3])]
    header = pb.AppendChunk(header=pb.AppendRequest(name=session.name))
    assert list((await site.raw.sessions.UploadAppend(iter([header, *tokens]))).token_ids) == [1, 2, 3]


@pytest.mark.parametrize(
    "chunks",
    [
        [],
        [pb.AppendChunk(text_utf8=b"x")],
        [pb.AppendChunk(header=pb.AppendRequest(name="workflows/w/sessions/s"))],
        [pb.AppendChunk(header=pb.AppendRequest(name="workflows/w/sessions/s"))] * 2,
        [
            pb.AppendChunk(header=pb.AppendRequest(name="workflows/w/sessions/s")),
            pb.AppendChunk(text_utf8=b"x"),
            pb.AppendChunk(tokens=common_pb2.TokenIds(ids=[1])),
        ],
        [
            pb.AppendChunk(header=pb.AppendRequest(name="workflows/w/sessions/s")),
            *[pb.AppendChunk(text_utf8=b"x" * 3_000_000)] * 6,
        ],
    ],
    ids=["nothing", "no header", "no input", "two headers", "two kinds", "too much"],
)
async def test_a_wrong_upload_is_refused_and_appends_nothing(site: Served, chunks: list[pb.AppendChunk]) -> None:
    session = await site.session()
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
        await site.raw.sessions.UploadAppend(iter(chunks))
    assert (await session.get()).head == 0


async def test_forks_share_the_prefix_and_go_their_own_ways(site: Served) -> None:
    session = await site.session(text="hello world")
    for _ in range(2):
        children = await session.fork(session_ids=["a", "b"], request_id="r", transient=True, ttl_s=60)
        assert [child.name for child in children] == ["workflows/w/sessions/a", "workflows/w/sessions/b"]
    first = await children[0].get()
    assert (first.parent, first.fork_position, first.head, first.transient) == (session.name, 11, 11, True)
    assert first.HasField("expire_time")
    await children[0].append(text="!")
    assert bytes((await children[1].tokens().result()).token_ids) == b"hello world"
    (below,) = await session.fork(position=5)
    assert bytes((await below.tokens().result()).token_ids) == b"hello"
    heads = [(await one.get()).seed for one in (session, below, *children)]
    assert heads[0] == heads[1], "one child inherits the seed"
    assert len(set(heads)) == 3, "several derive theirs"


async def test_rewind_goes_back_and_keeps_the_name(site: Served) -> None:
    session = await site.session(text="hello world")
    after = await session.rewind(5, request_id="r")
    assert (after.name, after.head) == (session.name, 5)
    assert (await session.rewind(5, request_id="r")).head == 5
    await session.append(text=" there")
    assert (await session.tokens().result()).text == b"hello there"


async def test_pause_frees_the_node_and_resume_brings_the_session_back(site: Served) -> None:
    session = await site.session(text="x" * 100)
    await settled(session)
    paused = await session.pause(request_id="p")
    assert (paused.state, paused.node) == (session_pb2.Session.PAUSED, "")
    assert site.engine.sequences == {}
    resumed = await session.resume()
    assert resumed.session.state in (session_pb2.Session.ACTIVE, session_pb2.Session.RESTORING)
    assert resumed.restored_tokens + resumed.replayed_tokens <= 100 and resumed.exact
    assert resumed.restored_tokens == 96 and resumed.restored_bytes > 0
    await session.generate(max_tokens=3).result()


async def test_a_deleted_session_is_hidden_until_it_is_undeleted(site: Served) -> None:
    session = await site.session(text="hello")
    deleted = await session.delete()
    assert deleted.state == session_pb2.Session.DELETED and deleted.HasField("purge_time")
    assert [one async for one in site.client.sessions.list("w")] == []
    assert [one.name async for one in site.client.sessions.list("w", show_deleted=True)] == [session.name]
    with pytest.raises(RemoteError) as error:
        await session.append(text="x")
    assert (error.value.code, error.value.reason) == ("NOT_FOUND", "NOT_FOUND")
    assert (await session.undelete()).state == session_pb2.Session.PAUSED
    await session.resume()
    assert (await session.append(text="!")).head == 6


async def test_follow_reads_what_comes_and_ends_at_its_end(site: Served) -> None:
    session = await site.session(text="hello")
    reader = session.tokens(2, 8, follow=True)

    async def write() -> None:
        for part in ("ab", "cd"):
            await asyncio.sleep(0.05)
            await session.append(text=part)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        group.create_task(write())
        assert (await reader.result()).text == b"lloabc"


async def test_every_generated_token_has_its_kind_and_logprob(site: Served) -> None:
    session = await site.session(text="hello")
    await session.generate(max_tokens=4, logprobs=True).result()
    chunks = [chunk async for chunk in session.tokens()]
    kinds = [kind for chunk in chunks for kind in chunk.kinds]
    assert kinds == [common_pb2.PROMPT] * 5 + [common_pb2.GENERATED] * 4
    logprobs = [value for chunk in chunks for value in chunk.logprobs]
    assert [value != value for value in logprobs] == [True] * 5 + [False] * 4
