"""What a request sets and this version does not honour is refused by name; nothing is silently ignored."""

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from forkpoint.errors import FieldNotSupportedError, InvalidFieldError
from forkpoint.proto.forkpoint.v1 import admin_pb2, checkpoint_pb2, common_pb2, session_pb2, workflow_pb2
from forkpoint.proto.forkpoint.v1 import session_service_pb2 as pb
from forkpoint.server.rpc.fields import HONOURED, LEAVES, check_request
from tests.support.rpc_site import Refusal, Served

NAME = "workflows/w/sessions/s"
MODULES = (pb, checkpoint_pb2, workflow_pb2, admin_pb2)


def methods() -> Iterator[tuple[str, Descriptor]]:
    """(method, request type) of every service."""
    for module in MODULES:
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"{service.name}.{method.name}", method.input_type


def test_every_honoured_path_exists() -> None:
    pool = descriptor_pool.Default()
    for name, paths in HONOURED.items():
        for path in paths:
            descriptor: Descriptor | None = pool.FindMessageTypeByName(name)
            for part in path.split("."):
                assert descriptor is not None, f"{name}: {path}"
                assert part in descriptor.fields_by_name, f"{name} has no {path}"
                descriptor = descriptor.fields_by_name[part].message_type


def with_field(descriptor: Descriptor, field: FieldDescriptor) -> Message:
    """A message with only `field` set."""
    message = message_factory.GetMessageClass(descriptor)()
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        value["k"] = "v"
    elif field.message_type is not None and field.is_repeated:
        value.add()
    elif field.message_type is not None:
        value.SetInParent()
    else:
        sample = (
            {str: "x", bytes: b"x", bool: True, float: 1.0, int: 1}[type(field.default_value)]
            if not field.is_repeated
            else 1
        )
        if not field.is_repeated:
            setattr(message, field.name, sample)
        else:
            value.append({"string": "x", "bytes": b"x"}.get(_kind(field), 1))
    return message


def _kind(field: FieldDescriptor) -> str:
    return {FieldDescriptor.TYPE_STRING: "string", FieldDescriptor.TYPE_BYTES: "bytes"}.get(field.type, "")


@pytest.mark.parametrize(
    ("method", "descriptor"), list(methods()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_each_field_is_either_honoured_or_refused_by_name(method: str, descriptor: Descriptor) -> None:
    honoured = HONOURED.get(descriptor.full_name, frozenset())
    for field in descriptor.fields:
        message = with_field(descriptor, field)
        if field.name in honoured:
            try:
                check_request(message)
            except InvalidFieldError as error:
                assert error.problem == "is required"
        else:
            with pytest.raises(FieldNotSupportedError) as refusal:
                check_request(message)
            assert refusal.value.field == field.name


def test_a_field_that_is_added_to_a_message_is_refused_until_it_is_listed() -> None:
    for name in HONOURED:
        descriptor = descriptor_pool.Default().FindMessageTypeByName(name)
        message = message_factory.GetMessageClass(descriptor)()
        message.ParseFromString(b"\xc0\x3e\x01")  # field 1000, varint 1
        with pytest.raises(FieldNotSupportedError, match="#1000"):
            check_request(message)


def test_an_unknown_field_deep_inside_is_refused_with_its_path() -> None:
    policy = common_pb2.CheckpointPolicy.FromString(b"\xc0\x3e\x01")
    request = pb.CreateSessionRequest(parent="workflows/w", session=session_pb2.Session(checkpoint_policy=policy))
    with pytest.raises(FieldNotSupportedError, match=r"session\.checkpoint_policy\.#1000"):
        check_request(request)


def test_leaves_are_messages_of_the_api() -> None:
    pool = descriptor_pool.Default()
    for name in LEAVES:
        assert pool.FindMessageTypeByName(name).full_name == name


@pytest.mark.parametrize(
    ("request_", "path"),
    [
        (
            pb.CreateSessionRequest(
                parent="workflows/w", session=session_pb2.Session(budget=common_pb2.Budget(max_tokens=1))
            ),
            "session.budget",
        ),
        (pb.CreateSessionRequest(parent="workflows/w", session=session_pb2.Session(head=3)), "session.head"),
        (pb.GenerateRequest(name=NAME, sampling=common_pb2.Sampling(presence_penalty=1)), "sampling.presence_penalty"),
        (pb.GenerateRequest(name=NAME, sampling=common_pb2.Sampling(grammar="g")), "sampling.grammar"),
        (pb.GenerateRequest(name=NAME, input=pb.AppendRequest(request_id="r")), "input.request_id"),
        (pb.ForkRequest(name=NAME, branch_budget=common_pb2.Budget(max_tokens=1)), "branch_budget"),
        (pb.ListSessionsRequest(parent="workflows/w", filter="x"), "filter"),
        (pb.UpdateSessionRequest(session=session_pb2.Session(name=NAME), request_id="r"), "request_id"),
        (checkpoint_pb2.CreateCheckpointRequest(parent=NAME, position=16), "position"),
        (
            workflow_pb2.CreateWorkflowRequest(workflow=workflow_pb2.Workflow(budget=common_pb2.Budget(max_tokens=1))),
            "workflow.budget",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_fields_of_later_versions_are_refused(request_: Message, path: str) -> None:
    with pytest.raises(FieldNotSupportedError) as refusal:
        check_request(request_)
    assert refusal.value.field == path


def test_a_recovery_time_target_is_refused() -> None:
    request = pb.CreateSessionRequest(parent="workflows/w")
    request.session.checkpoint_policy.recovery_time_target.seconds = 1
    with pytest.raises(FieldNotSupportedError, match="recovery_time_target"):
        check_request(request)


def test_an_update_may_send_back_what_it_read_but_not_ask_for_what_is_not_there() -> None:
    session = session_pb2.Session(name=NAME, head=3, state=session_pb2.Session.ACTIVE, labels={"a": "b"})
    check_request(pb.UpdateSessionRequest(session=session))
    session.budget.max_tokens = 5
    with pytest.raises(FieldNotSupportedError, match=r"session\.budget"):
        check_request(pb.UpdateSessionRequest(session=session))


async def test_the_server_answers_with_the_field_and_changes_nothing(site: Served) -> None:
    request = pb.CreateSessionRequest(parent="workflows/w", session_id="s")
    request.session.budget.max_tokens = 5
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "FIELD_NOT_SUPPORTED") as refusal:
        await site.raw.sessions.CreateSession(request)
    assert refusal.info.metadata["field"] == "session.budget"
    assert "session.budget" in str(refusal.details["google.rpc.BadRequest"])
    assert [session async for session in site.client.sessions.list("w")] == []
    session = await site.session("s")
    mask = pb.UpdateSessionRequest(session=session_pb2.Session(name=session.name))
    mask.update_mask.paths.append("head")
    async with Refusal(grpc.StatusCode.INVALID_ARGUMENT, "FIELD_NOT_SUPPORTED"):
        await site.raw.sessions.UpdateSession(mask)


UNIMPLEMENTED = {
    "SessionService.Watch",
    "WorkflowService.GetBudget",
    "WorkflowService.UpdateBudget",
}


async def test_methods_of_later_versions_are_unimplemented_and_say_so(site: Served) -> None:
    seen = set()
    for method, descriptor in methods():
        if method not in UNIMPLEMENTED:
            continue
        seen.add(method)
        service, name = method.split(".")
        kind = message_factory.GetMessageClass(descriptor)
        call = site.raw.channel.unary_unary(
            f"/forkpoint.v1.{service}/{name}", request_serializer=kind.SerializeToString, response_deserializer=bytes
        )
        async with Refusal(grpc.StatusCode.UNIMPLEMENTED, "METHOD_NOT_IMPLEMENTED") as refusal:
            await call(with_field(descriptor, descriptor.fields[0]) if descriptor.fields else kind(), timeout=20)
        assert name in refusal.message
    assert seen == UNIMPLEMENTED
