"""Everything that a careless client may send to a served tiny model: a clear refusal, and a session that is unmoved."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from forkpoint.client.client import Client
from forkpoint.client.errors import RemoteError
from forkpoint.client.generation import Generation
from forkpoint.client.session import Session
from forkpoint.client.wire import Connection
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from tests.support.tiny_site import drained, log, parts, refused, serving

CONTEXT_LIMIT = 65_536
VOCABULARY = 272
TURNS = (b"import os\n\n\ndef first(path):\n", b"\n\ndef second(path):\n", b"\n\nclass Third:\n")


def turn(session: Session, number: int) -> Generation:
    """Turn `number`: the same tokens in every session of the same seed and past."""
    request_id = f"{session.name[-5:]}-{number}"
    return session.generate(text=TURNS[number], max_tokens=20, temperature=0.8, request_id=request_id)


async def wrong_positions(session: Session, raw: Connection) -> None:
    head = (await session.get()).head
    for call in (session.fork(position=head + 1), session.rewind(head + 1), session.tokens(head + 1).result()):
        error = await refused(call, "OUT_OF_RANGE", "POSITION_BEYOND_HEAD")
        assert error.metadata["head"] == str(head)
    await refused(session.append(text=b"x", expected_position=head - 1), "ABORTED", "POSITION_CONFLICT")
    await refused(session.append(text=b"x", expected_position=head + 1), "DATA_LOSS", "LOG_TAIL_MISSING")
    await refused(session.rewind(-1), "INVALID_ARGUMENT", "INVALID_FIELD")


async def reused_request_ids(session: Session, raw: Connection) -> None:
    taken = f"{session.name[-5:]}-0"
    for call in (
        session.append(text=b"other", request_id=taken),
        session.rewind(0, request_id=taken),
        session.fork(request_id=taken),
        session.generate(text=TURNS[0], max_tokens=21, request_id=taken).result(),
    ):
        await refused(call, "INVALID_ARGUMENT", "REQUEST_ID_REUSED")


async def too_much_and_unreadable(session: Session, raw: Connection) -> None:
    error = await refused(session.append(tokens=[97] * CONTEXT_LIMIT), "RESOURCE_EXHAUSTED", "CONTEXT_FULL")
    assert error.metadata["limit"] == str(CONTEXT_LIMIT)
    long = session.generate(text=b"x" * CONTEXT_LIMIT, max_tokens=1)
    await refused(long.result(), "RESOURCE_EXHAUSTED", "CONTEXT_FULL")
    for bad, at in ((b"ab\xff", "2"), (b"\xed\xa0\x80", "0"), (b"caf\xc3", "3")):
        error = await refused(session.append(text=bad), "INVALID_ARGUMENT", "NOT_UTF8")
        assert error.metadata["byte_offset"] == at and error.violations[0].field == "text_utf8"
    await refused(session.append(messages=[("user", b"\xff")]), "INVALID_ARGUMENT", "NOT_UTF8")
    await refused(session.generate(stop_text=[b"\xff"], max_tokens=1).result(), "INVALID_ARGUMENT", "NOT_UTF8")
    for ids in ([VOCABULARY], [0, 2**32 - 1]):
        await refused(session.append(tokens=ids), "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE")
    await refused(session.generate(stop_ids=[VOCABULARY]).result(), "INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE")
    await refused(session.append(messages=[("nobody", "x")]), "INVALID_ARGUMENT", "INVALID_FIELD")
    await refused(session.append(), "INVALID_ARGUMENT", "INVALID_FIELD")


async def what_is_not_there(session: Session, raw: Connection) -> None:
    nobody = f"{session.name}-nobody"
    for call in (
        raw.sessions.GetSession(pb.GetSessionRequest(name=nobody)),
        raw.sessions.Append(pb.AppendRequest(name=nobody, text_utf8=b"x")),
        raw.sessions.Fork(pb.ForkRequest(name=nobody)),
        raw.sessions.Rewind(pb.RewindRequest(name=nobody, position=0)),
        raw.sessions.Pause(pb.PauseRequest(name=nobody)),
        raw.sessions.Resume(pb.ResumeRequest(name=nobody)),
        raw.sessions.DeleteSession(pb.DeleteSessionRequest(name=nobody)),
        drained(raw.sessions.Generate(pb.GenerateRequest(name=nobody))),
        drained(raw.sessions.ReadTokens(pb.ReadTokensRequest(name=nobody))),
        drained(raw.sessions.Export(pb.ExportRequest(name=nobody))),
    ):
        await refused(call, "NOT_FOUND", "NOT_FOUND")


async def two_writers_at_once(session: Session, raw: Connection) -> None:
    """Sixteen writers on one child: its log holds exactly what was acknowledged, and then it is deleted."""
    (child,) = await session.fork(session_ids=[f"{session.name[-5:]}-raced"])
    before = (await child.get()).head

    async def write(number: int) -> tuple[int, bytes] | None:
        text = b"#%02d\n" % number
        try:
            return (await child.append(text=text, request_id=f"{child.name[-9:]}-{number}")).start, text
        except RemoteError as error:
            assert (error.code, error.reason) == ("ABORTED", "SESSION_BUSY")
            return None

    done = sorted(one for one in await asyncio.gather(*(write(number) for number in range(16))) if one)
    assert done, "somebody wins"
    assert bytes((await log(child))[before:]) == b"".join(text for _, text in done)
    running = child.generate(max_tokens=120, temperature=1.0)
    await anext(running)
    await refused(child.append(text=b"x"), "ABORTED", "SESSION_BUSY")
    await refused(child.generate(max_tokens=1).result(), "ABORTED", "SESSION_BUSY")
    await child.delete()
    for call in (child.fork(), child.append(text=b"x"), child.generate(max_tokens=1).result(), child.rewind(0)):
        await refused(call, "NOT_FOUND", "NOT_FOUND")


REFUSALS: tuple[Callable[[Session, Connection], Awaitable[None]], ...] = (
    wrong_positions,
    reused_request_ids,
    too_much_and_unreadable,
    what_is_not_there,
    two_writers_at_once,
)


async def test_a_session_between_whose_turns_everything_wrong_was_tried_equals_one_left_alone(tmp_path: Path) -> None:
    async with serving(tmp_path) as server, Client(server.address) as client:
        raw = Connection(server.address)
        try:
            await client.workflows.create("w")
            tried = await client.sessions.create("w", "tried", seed=11)
            quiet = await client.sessions.create("w", "quiet", seed=11)
            await refused(tried.generate(max_tokens=4).result(), "INVALID_ARGUMENT", "EMPTY_SESSION")
            for number in range(len(TURNS)):
                running = turn(tried, number)
                if number == 2:
                    await anext(running)
                    await what_is_not_there(tried, raw)
                    await refused(tried.append(text=b"\xff"), "INVALID_ARGUMENT", "NOT_UTF8")
                    await refused(tried.append(text=b"x"), "ABORTED", "SESSION_BUSY")
                await running.result()
                for refusals in REFUSALS if number == 0 else REFUSALS[:2]:
                    await refusals(tried, raw)
            for number in range(len(TURNS)):
                await turn(quiet, number).result()
            assert await log(tried) == await log(quiet)
            assert await parts(tried) == await parts(quiet)
            assert (await tried.get()).exact
            assert {session.name async for session in client.sessions.list("w")} == {tried.name, quiet.name}
        finally:
            await raw.channel.close()
        assert await server.stop() == 0
