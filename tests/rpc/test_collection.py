"""Checkpoints that are deleted, that expire, that are collected: over the wire."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from forkpoint.client.errors import RemoteError
from forkpoint.proto.forkpoint.v1 import admin_pb2, checkpoint_pb2, common_pb2
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from tests.support.rpc_site import Refusal, Served, served, settled

EAGER: dict[str, Any] = {"keep_last": 2, "ladder_step": 0, "gc_interval_seconds": 0, "gc_grace_seconds": 0}


async def collect(site: Served, dry_run: bool = False) -> admin_pb2.GcProgress:
    *_, last = [event async for event in site.client.garbage.collect(dry_run=dry_run)]
    assert last.done
    return last


async def test_a_checkpoint_is_deleted_once_and_answers_the_same(site: Served) -> None:
    session = await site.session(text="x" * 70)
    made = await session.checkpoint("c")
    gone = await site.client.checkpoints.delete(made.name, request_id="d")
    assert (gone.name, gone.position, gone.grid_position) == (made.name, made.position, made.grid_position)
    assert (list(gone.parts), list(gone.numerics_ids), gone.exact) == ([], [], False)
    assert await site.client.checkpoints.delete(made.name, request_id="d") == gone
    for name in (made.name, f"{session.name}/checkpoints/never"):
        with pytest.raises(RemoteError) as refusal:
            await site.client.checkpoints.delete(name)
        assert refusal.value.code == "NOT_FOUND"
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_ID_REUSED"):
        other = checkpoint_pb2.DeleteCheckpointRequest(name=f"{session.name}/checkpoints/x", request_id="d")
        await site.raw.checkpoints.DeleteCheckpoint(other)
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
        await site.raw.checkpoints.DeleteCheckpoint(checkpoint_pb2.DeleteCheckpointRequest(name="nonsense"))


async def test_a_checkpoint_says_when_it_expires(site: Served) -> None:
    session = await site.session(text="x" * 70)
    forever = await session.checkpoint("a")
    bounded = await session.checkpoint("b", ttl_s=100)
    assert not forever.HasField("expire_time")
    assert bounded.expire_time.ToMicroseconds() > bounded.create_time.ToMicroseconds() + 90_000_000
    assert (await site.client.checkpoints.get(bounded.name)).expire_time == bounded.expire_time
    for ttl_s in (0.0, -1.0):
        with pytest.raises(RemoteError) as refusal:
            await session.checkpoint("c", ttl_s=ttl_s)
        assert (refusal.value.code, refusal.value.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
    past = checkpoint_pb2.CreateCheckpointRequest(parent=session.name)
    past.expire_time.FromSeconds(1)
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD") as refused:
        await site.raw.checkpoints.CreateCheckpoint(past)
    assert "expire_time" in refused.message


async def test_a_collection_tells_what_it_did(tmp_path: Path) -> None:
    async with served(tmp_path / "data", **EAGER) as site:
        session = await site.session(text="x" * 70)
        made = await session.checkpoint("c")
        await settled(session)
        await site.client.checkpoints.delete(made.name)
        await site.parts.blobs.put("ab" * 32, b"left over")
        dry, real, again = await collect(site, dry_run=True), await collect(site), await collect(site)
        assert dry.blobs_deleted == real.blobs_deleted > 0
        assert dry.bytes_deleted == real.bytes_deleted > 0
        assert (again.blobs_deleted, again.manifests_removed, again.stopped) == (0, 0, "")
        assert real.tier == site.parts.blobs.tier
        assert not await site.parts.blobs.has("ab" * 32)


async def test_retention_follows_the_settings_and_the_session(tmp_path: Path) -> None:
    async with served(tmp_path / "data", **EAGER) as site:
        for keep, left in ((0, 2), (3, 3)):
            session = await site.client.sessions.create("w", f"s{keep}", every_tokens=16, keep_last=keep)
            assert (await session.get()).checkpoint_policy.keep_last == keep
            for _ in range(5):
                before = site.running.node.counters.checkpoints_written
                await session.append(text="y" * 16)
                await settled(session)
                while site.running.node.counters.checkpoints_written == before:
                    await settled(session)
            dry = await collect(site, dry_run=True)
            assert len(dry.dropped) == 5 - left
            assert {one.reason for one in dry.dropped} == {"THINNED"}
            assert dict((await collect(site)).checkpoints_dropped) == {"THINNED": 5 - left}
            assert len([one async for one in site.client.checkpoints.list(session.name)]) == left
        await session.update(keep_last=2)
        assert (await session.get()).checkpoint_policy == common_pb2.CheckpointPolicy(every_tokens=16, keep_last=2)
        assert dict((await collect(site)).checkpoints_dropped) == {"THINNED": 1}


@pytest.mark.parametrize("keep", [1, -1, 1001])
async def test_a_number_that_is_out_of_bounds_is_refused(site: Served, keep: int) -> None:
    request = pb.CreateSessionRequest(parent="workflows/w", session_id="s")
    request.session.checkpoint_policy.keep_last = keep
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD") as refusal:
        await site.raw.sessions.CreateSession(request)
    assert "keep_last" in refusal.message


async def test_only_one_node_collects_a_tier(tmp_path: Path) -> None:
    async with served(tmp_path / "data", **{**EAGER, "gc_interval_seconds": 1000}) as first:
        await collect(first)
        async with served(tmp_path / "data", workflow=False, node="second", **EAGER) as second:
            async with Refusal(grpc.StatusCode.FAILED_PRECONDITION, "COLLECTED_ELSEWHERE") as refusal:
                await _raw(second, admin_pb2.CollectGarbageRequest())
            assert first.running.node.incarnation in refusal.message
            assert (await collect(second, dry_run=True)).done


async def _raw(site: Served, request: admin_pb2.CollectGarbageRequest) -> None:
    async for _ in site.raw.admin.CollectGarbage(request):
        pass


async def test_a_request_id_is_refused_as_it_means_nothing_here(site: Served) -> None:
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "FIELD_NOT_SUPPORTED"):
        await _raw(site, admin_pb2.CollectGarbageRequest(request_id="r"))


async def test_a_caller_that_leaves_stops_the_collection(tmp_path: Path) -> None:
    async with served(tmp_path / "data", **EAGER) as site:
        for index in range(40):
            await site.parts.blobs.put(f"{index:02x}" * 32, b"left over")
        events = site.client.garbage.collect()
        async for _ in events:
            break
        await events.cancel()
        assert (await collect(site)).done
        assert [digest async for digest in site.parts.blobs.digests()] == []
