"""Export and import: the same log, generations and settings under another name, on another store."""

from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import grpc
import pytest

from forkpoint.proto.forkpoint.v1 import common_pb2, export_pb2
from tests.support.hash_engine import HashEngine
from tests.support.rpc_site import Refusal, Served, served, settled

Chunk = export_pb2.ExportChunk
TARGET = Chunk(target=export_pb2.ImportTarget(parent="workflows/w", session_id="copy"))


async def exported(site: Served) -> tuple[list[Chunk], list[int]]:
    """A session's chunks and its tokens."""
    session = await site.client.sessions.create("w", "s", seed=3, every_tokens=64, labels={"a": "b"})
    await session.append(text="hello " * 20)
    await session.generate(max_tokens=30, temperature=0.5, stop_text=["~"], logprobs=True, request_id="g").result()
    await session.append(messages=[("user", "and now?")])
    chunks = [chunk async for chunk in session.export()]
    return chunks, (await session.tokens().result()).token_ids


async def stream(chunks: Iterable[Chunk]) -> AsyncIterator[Chunk]:
    for chunk in chunks:
        yield chunk


async def test_an_export_is_header_generations_slices_and_trailer(site: Served) -> None:
    chunks, tokens = await exported(site)
    assert [chunk.WhichOneof("part") for chunk in chunks[:1] + chunks[-1:]] == ["header", "trailer"]
    header = chunks[0].header
    assert (header.format_version, header.namespace, header.seed, header.head) == (1, "default", 3, len(tokens))
    generation = chunks[1].generation
    assert (generation.request_id, generation.start, generation.end) == ("g", 120, 150)
    assert (generation.reason, list(generation.stop_text)) == (common_pb2.LENGTH, [b"~"])
    assert [token for chunk in chunks[2:-1] for token in chunk.slice.token_ids] == tokens
    assert (chunks[-1].trailer.head, chunks[-1].trailer.head_hash) == (header.head, header.head_hash)


async def test_an_import_on_another_store_is_the_same_session(site: Served, tmp_path: Path) -> None:
    chunks, tokens = await exported(site)
    source = await site.client.sessions.open("workflows/w/sessions/s").get()
    async with served(tmp_path / "other") as other:
        for _ in range(2):
            copy = await other.client.sessions.import_("w", stream(chunks), "copy", request_id="r")
        now = await settled(copy)
        assert (now.name, now.head, now.head_hash) == ("workflows/w/sessions/copy", source.head, source.head_hash)
        assert (now.seed, dict(now.labels), now.checkpoint_policy.every_tokens) == (3, {"a": "b"}, 64)
        assert (await copy.tokens().result()).token_ids == tokens
        assert [chunk.slice for chunk in [c async for c in copy.export()][2:-1]] == [c.slice for c in chunks[2:-1]]
        original = site.client.sessions.open("workflows/w/sessions/s")
        here, there = [
            (await one.generate(max_tokens=20, temperature=1.0).result()).token_ids for one in (original, copy)
        ]
        assert here == there


async def test_an_import_of_another_model_is_refused(site: Served, tmp_path: Path) -> None:
    chunks, _ = await exported(site)
    async with served(tmp_path / "other", HashEngine(model=b"other".ljust(32))) as other:
        async with Refusal(grpc.StatusCode.FAILED_PRECONDITION, "STATE_INCOMPATIBLE"):
            await other.raw.sessions.Import(iter([TARGET, *chunks]))
        assert [session async for session in other.client.sessions.list("w")] == []


@pytest.mark.parametrize("damage", ["no target", "no header", "no trailer", "a gap", "other head", "unequal lengths"])
async def test_a_damaged_import_is_refused_and_leaves_no_session(site: Served, damage: str) -> None:
    chunks, _ = await exported(site)
    header, pieces, trailer = chunks[0], chunks[1:-1], chunks[-1]
    first = next(chunk.slice for chunk in pieces if chunk.HasField("slice"))
    match damage:
        case "no target":
            sent = [header, *pieces, trailer]
        case "no header":
            sent = [TARGET, *pieces, trailer]
        case "no trailer":
            sent = [TARGET, header, *pieces]
        case "a gap":
            first.start = 1
            sent = [TARGET, header, *pieces, trailer]
        case "other head":
            header.header.head += 1
            sent = [TARGET, header, *pieces, trailer]
        case _:
            del first.kinds[-1]
            sent = [TARGET, header, *pieces, trailer]
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
        await site.raw.sessions.Import(iter(sent))
    assert [session.name async for session in site.client.sessions.list("w")] == ["workflows/w/sessions/s"]


async def test_an_import_whose_tokens_do_not_hash_to_its_head_is_refused(site: Served) -> None:
    chunks, _ = await exported(site)
    chunks[2].slice.token_ids[0] ^= 1
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await site.raw.sessions.Import(iter([TARGET, *chunks]))
    assert error.value.code() in (grpc.StatusCode.DATA_LOSS, grpc.StatusCode.INVALID_ARGUMENT)
    assert [session.name async for session in site.client.sessions.list("w")] == ["workflows/w/sessions/s"]
