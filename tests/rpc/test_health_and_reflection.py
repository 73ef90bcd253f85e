"""grpc.health.v1 (Check, Watch, List) and reflection, v1 and v1alpha."""

import asyncio
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from forkpoint.proto.forkpoint.internal.v1 import health_list_pb2
from forkpoint.server.rpc.health import Health
from forkpoint.server.rpc.server import SERVICES
from tests.support.rpc_site import Served

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def health_call(channel: grpc.aio.Channel, method: str, stream: bool = False) -> Any:
    make = channel.unary_stream if stream else channel.unary_unary
    return make(
        f"/grpc.health.v1.Health/{method}",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )


async def test_each_service_and_the_server_are_serving(site: Served) -> None:
    check = health_call(site.raw.channel, "Check")
    for service in ("", *SERVICES):
        assert (await check(health_pb2.HealthCheckRequest(service=service))).status == SERVING
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await check(health_pb2.HealthCheckRequest(service="nobody"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_list_names_every_service(site: Served) -> None:
    listing: Any = site.raw.channel.unary_unary(
        "/grpc.health.v1.Health/List",
        request_serializer=health_list_pb2.HealthListRequest.SerializeToString,
        response_deserializer=health_list_pb2.HealthListResponse.FromString,
    )
    answer = await listing(health_list_pb2.HealthListRequest())
    assert {name: entry.status for name, entry in answer.statuses.items()} == dict.fromkeys(["", *SERVICES], SERVING)


async def test_watchers_are_told_when_the_node_drains_and_others_are_not_answered(site: Served) -> None:
    watch = health_call(site.raw.channel, "Watch", stream=True)
    calls = [watch(health_pb2.HealthCheckRequest(service=service)) for service in ("", SERVICES[0], "nobody")]
    assert [(await call.read()).status for call in calls] == [
        SERVING,
        SERVING,
        health_pb2.HealthCheckResponse.SERVICE_UNKNOWN,
    ]
    await site.running.rpc.begin_drain()
    async with asyncio.timeout(5):
        assert [(await call.read()).status for call in calls[:2]] == [NOT_SERVING, NOT_SERVING]
    assert (await health_call(site.raw.channel, "Check")(health_pb2.HealthCheckRequest())).status == NOT_SERVING
    for call in calls:
        call.cancel()


async def test_health_is_not_serving_before_the_engine_is_warm_and_never_again_after_a_drain() -> None:
    health = Health(["a"])
    assert (await health.Check(health_pb2.HealthCheckRequest(service="a"), None)).status == NOT_SERVING
    await health.serve()
    assert (await health.Check(health_pb2.HealthCheckRequest(service="a"), None)).status == SERVING
    await health.stop()
    await health.serve()
    assert (await health.Check(health_pb2.HealthCheckRequest(service="a"), None)).status == NOT_SERVING


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_describes_the_services(site: Served, version: str) -> None:
    call: Any = site.raw.channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    listed = {service.name for service in (await call.read()).list_services_response.service}
    assert listed >= {*SERVICES, "grpc.health.v1.Health", "grpc.reflection.v1.ServerReflection"}
    await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="forkpoint.v1.SessionService"))
    (data,) = (await call.read()).file_descriptor_response.file_descriptor_proto[:1]
    assert descriptor_pb2.FileDescriptorProto.FromString(data).package == "forkpoint.v1"
    await call.done_writing()
