"""Checkpoints, workflows and nodes over the wire."""

import grpc
import pytest

from forkpoint.client.errors import RemoteError
from forkpoint.proto.forkpoint.v1 import admin_pb2, checkpoint_pb2
from tests.support.rpc_site import Refusal, Served, settled


async def test_a_checkpoint_lists_its_parts_and_verifies(site: Served) -> None:
    session = await site.session(text="x" * 70)
    checkpoint = await session.checkpoint("c", request_id="r")
    assert checkpoint.name == f"{session.name}/checkpoints/c"
    assert (checkpoint.position, checkpoint.grid_position, checkpoint.automatic) == (70, 64, False)
    assert checkpoint.exact and list(checkpoint.numerics_ids) == ["hash-1"]
    assert sum(part.bytes for part in checkpoint.parts) == checkpoint.bytes_total == 32 + 64 * 8
    assert all(len(part.blake3) == 64 for part in checkpoint.parts)
    assert (await session.checkpoint("c", request_id="r")).position == 70
    read = await site.client.checkpoints.get(checkpoint.name)
    assert read.parts == checkpoint.parts
    events = [event async for event in site.client.checkpoints.verify(checkpoint.name)]
    assert [event.part.problem for event in events[:-1]] == [""] * len(checkpoint.parts)
    result = events[-1].result
    assert (result.parts_checked, result.parts_damaged, result.bytes_checked) == (2, 0, checkpoint.bytes_total)


async def test_checkpoints_are_listed_by_position_in_pages(site: Served) -> None:
    session = await site.session(text="x" * 20)
    await settled(session)
    for name in ("b", "a"):
        await session.checkpoint(name)
        await session.append(text="y" * 16)
        await settled(session)
    listed = [one async for one in site.client.checkpoints.list(session.name)]
    assert [one.position for one in listed] == sorted(one.position for one in listed)
    names = [one.name.rpartition("/")[2] for one in listed if not one.automatic]
    assert names == ["b", "a"]
    first = await site.raw.checkpoints.ListCheckpoints(
        checkpoint_pb2.ListCheckpointsRequest(parent=session.name, page_size=1)
    )
    rest = await site.raw.checkpoints.ListCheckpoints(
        checkpoint_pb2.ListCheckpointsRequest(parent=session.name, page_token=first.next_page_token)
    )
    assert [*first.checkpoints, *rest.checkpoints] == listed


async def test_an_unknown_checkpoint_is_not_found_and_a_wrong_name_is_said(site: Served) -> None:
    session = await site.session(text="x" * 20)
    async with Refusal(grpc.StatusCode.NOT_FOUND, "NOT_FOUND"):
        await site.raw.checkpoints.GetCheckpoint(
            checkpoint_pb2.GetCheckpointRequest(name=f"{session.name}/checkpoints/c")
        )
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
        await site.raw.checkpoints.GetCheckpoint(checkpoint_pb2.GetCheckpointRequest(name=session.name))


async def test_workflows_live_their_life(site: Served) -> None:
    made = await site.client.workflows.create("v", labels={"a": "1"}, request_id="r")
    assert await site.client.workflows.create("v", labels={"a": "1"}, request_id="r") == made
    assert (made.name, dict(made.labels), made.etag) == ("workflows/v", {"a": "1"}, "1")
    drawn = await site.client.workflows.create()
    assert await site.client.workflows.get(drawn.name) == drawn
    assert {one.name async for one in site.client.workflows.list()} == {"workflows/w", "workflows/v", drawn.name}
    after = await site.client.workflows.update("v", {"a": "2"}, etag="1")
    assert (dict(after.labels), after.etag) == ({"a": "2"}, "2")
    with pytest.raises(RemoteError) as error:
        await site.client.workflows.update("v", {"a": "3"}, etag="1")
    assert (error.value.code, error.value.reason) == ("ABORTED", "ETAG_MISMATCH")
    await site.client.workflows.delete("v")
    with pytest.raises(RemoteError) as error:
        await site.client.workflows.get("v")
    assert error.value.code == "NOT_FOUND"


async def test_a_workflow_with_sessions_is_not_deleted(site: Served) -> None:
    session = await site.session()
    with pytest.raises(RemoteError) as error:
        await site.client.workflows.delete("w")
    assert error.value.code == "FAILED_PRECONDITION"
    await session.delete()
    await site.client.workflows.delete("w")


async def test_usage_counts_shared_tokens_once_for_the_workflow_and_whole_for_each_session(site: Served) -> None:
    session = await site.session("a", text="hello")
    await session.generate(max_tokens=10).result()
    (child,) = await session.fork(session_ids=["b"])
    await child.append(text="!!")
    total = await site.client.workflows.usage("w")
    assert (total.prompt_tokens, total.generated_tokens) == (7, 10)
    each = {one.session.rpartition("/")[2]: one.usage async for one in site.client.workflows.session_usage("w")}
    assert (each["a"].prompt_tokens, each["a"].generated_tokens) == (5, 10)
    assert (each["b"].prompt_tokens, each["b"].generated_tokens) == (7, 10)


async def test_nodes_are_listed_and_found_by_name(site: Served) -> None:
    (node,) = [one async for one in site.client.nodes.list()]
    assert (node.name, node.address, node.numerics_id) == ("nodes/node", site.address, "hash-1")
    assert node.incarnation == site.running.node.incarnation
    assert (await site.client.nodes.get("node")).incarnation == node.incarnation
    async with Refusal(grpc.StatusCode.NOT_FOUND, "NOT_FOUND"):
        await site.raw.admin.GetNode(admin_pb2.GetNodeRequest(name="nodes/other"))
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"):
        await site.raw.admin.GetNode(admin_pb2.GetNodeRequest(name="node"))
