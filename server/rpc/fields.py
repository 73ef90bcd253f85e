"""Which request fields this version honours. Whatever else is set is refused, so nothing is silently ignored.

The table is the whole truth: a field that is added to a .proto is refused until it is listed here. Paths are dotted
field names from the request; repeated fields have no index. Naming a message field honours all of it only when the
message is a leaf (below); else its fields are named one by one. Fields that a client's protobuf knows and ours does
not are refused as well.
"""

from collections.abc import Iterator
from typing import Any, Final

from google.api import field_behavior_pb2
from google.protobuf import unknown_fields
from google.protobuf.message import Message

from forkpoint.errors import FieldNotSupportedError, InvalidFieldError

LEAVES: Final = frozenset(
    {
        "forkpoint.v1.TokenIds",
        "google.protobuf.Timestamp",
        "google.protobuf.Duration",
        "google.protobuf.FieldMask",
    }
)
"""Messages that are honoured as one value."""

_CHAT: Final = (
    "messages messages.messages messages.messages.role messages.messages.text_utf8 messages.messages.name "
    "messages.add_generation_prompt messages.thinking messages.thinking_effort"
)
_INPUT: Final = f"tokens text_utf8 {_CHAT}"
_POLICY: Final = "checkpoint_policy.every_tokens checkpoint_policy.on_turn_end checkpoint_policy.keep_last"
_SAMPLING: Final = "temperature top_k top_p min_p seed"


def _paths(text: str) -> frozenset[str]:
    """Dotted paths with all their parents."""
    paths = set[str]()
    for path in text.split():
        parts = path.split(".")
        paths.update(".".join(parts[: depth + 1]) for depth in range(len(parts)))
    return frozenset(paths)


def _below(prefix: str, text: str) -> str:
    return " ".join(f"{prefix}.{path}" for path in text.split())


HONOURED: Final[dict[str, frozenset[str]]] = {
    name if "." in name else f"forkpoint.v1.{name}": _paths(text)
    for name, text in {
        # sessions
        "CreateSessionRequest": "parent session_id request_id seed "
        + _below("session", f"labels transient expire_time ttl standbys {_POLICY}"),
        "GetSessionRequest": "name",
        "ListSessionsRequest": "parent page_size page_token show_deleted",
        "UpdateSessionRequest": "update_mask "
        + _below("session", f"name etag labels expire_time ttl standbys {_POLICY}"),
        "DeleteSessionRequest": "name request_id",
        "UndeleteSessionRequest": "name",
        "AppendRequest": f"name {_INPUT} request_id expected_position expected_head_hash durability",
        "AppendChunk": f"{_INPUT} "
        + _below("header", "name request_id expected_position expected_head_hash durability"),
        "GenerateRequest": "name request_id expected_position resume_position max_tokens stop_text stop_ids "
        "cancel_on_disconnect logprobs "
        + _below("input", f"name {_INPUT} expected_position expected_head_hash durability ")
        + " "
        + _below("sampling", _SAMPLING),
        "CancelGenerationRequest": "name",
        "ReadTokensRequest": "name start end follow",
        "ForkRequest": "name request_id position count session_ids seed_policy transient ttl",
        "RewindRequest": "name request_id position",
        "PauseRequest": "name request_id",
        "ResumeRequest": "name request_id",
        "ExportRequest": "name",
        "ExportChunk": _below("target", "parent session_id request_id")
        + " "
        + _below(
            "header",
            "format_version namespace model.model_digest model.tokenizer_digest source_name head head_hash seed labels "
            f"transient {_POLICY}",
        )
        + " "
        + _below(
            "generation",
            "generation request_id start end reason input_start max_tokens stop_text stop_ids logprobs "
            + _below("sampling", _SAMPLING),
        )
        + " "
        + _below("slice", "start token_ids kinds logprobs")
        + " trailer.head trailer.head_hash",
        # checkpoints
        "CreateCheckpointRequest": "parent checkpoint_id request_id expire_time ttl",
        "GetCheckpointRequest": "name",
        "ListCheckpointsRequest": "parent page_size page_token",
        "DeleteCheckpointRequest": "name request_id",
        "VerifyCheckpointRequest": "name",
        # workflows
        "CreateWorkflowRequest": "workflow_id request_id workflow.labels workflow.standbys",
        "GetWorkflowRequest": "name",
        "ListWorkflowsRequest": "page_size page_token",
        "UpdateWorkflowRequest": "update_mask workflow.name workflow.etag workflow.labels workflow.standbys",
        "DeleteWorkflowRequest": "name",
        "GetUsageRequest": "name",
        "ListSessionUsageRequest": "parent page_size page_token",
        # nodes
        "ListNodesRequest": "page_size page_token",
        "GetNodeRequest": "name",
        "WatchNodesRequest": "",
        "ReleaseQuarantineRequest": "name request_id",
        "MigrateSessionRequest": "name target_node",
        "DrainNodeRequest": "name",
        "UndrainNodeRequest": "name",
        "RebalanceRequest": "moves_max dry_run",
        "CollectGarbageRequest": "dry_run",
        # other nodes
        "forkpoint.internal.v1.FollowRequest": "name epoch owner_address migration owner",
        "forkpoint.internal.v1.CutOverRequest": "name epoch head head_hash migration",
        "forkpoint.internal.v1.HasBlobsRequest": "digests",
        "forkpoint.internal.v1.FetchBlobRequest": "digest",
    }.items()
}

READ_MODIFY_WRITE: Final = frozenset({"forkpoint.v1.UpdateSessionRequest", "forkpoint.v1.UpdateWorkflowRequest"})
"""Requests whose resource may come back as it was read: its output-only fields are no wish of the client."""


OPTIONAL_HERE: Final = {
    "forkpoint.v1.GenerateRequest": frozenset({"input.name"}),
    "forkpoint.v1.AppendChunk": frozenset({"messages.messages"}),
}
"""Required fields that a message does not need where it is nested: the call's name, or another chunk, has them."""


def is_served(request: Message) -> bool:
    """Whether this version knows any field of such a request. A method whose request has no row here is not built."""
    return request.DESCRIPTOR.full_name in HONOURED


def check_request(request: Message) -> None:
    """Raise FieldNotSupportedError for a set field that is not honoured, InvalidFieldError for a required one that is
    not set."""
    name = request.DESCRIPTOR.full_name
    _check(request, "", HONOURED.get(name, frozenset()), name in READ_MODIFY_WRITE)
    _check_required(request, "", OPTIONAL_HERE.get(name, frozenset()))


def _check(message: Message, prefix: str, honoured: frozenset[str], output_only_is_fine: bool) -> None:
    unknown = unknown_fields.UnknownFieldSet(message)
    if len(unknown):
        raise FieldNotSupportedError(f"{prefix}#{unknown[0].field_number}", "this version does not know the field")
    for field, value in message.ListFields():
        path = prefix + field.name
        if output_only_is_fine and field_behavior_pb2.OUTPUT_ONLY in _behaviours(field):
            continue
        if path not in honoured:
            raise FieldNotSupportedError(path)
        for child in _children(field, value):
            _check(child, path + ".", honoured, output_only_is_fine)


def _check_required(message: Message, prefix: str, optional: frozenset[str]) -> None:
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        path = prefix + field.name
        present = message.HasField(field.name) if field.has_presence else bool(value)
        if not present and path not in optional and field_behavior_pb2.REQUIRED in _behaviours(field):
            raise InvalidFieldError(path, "is required")
        if present:
            for child in _children(field, value):
                _check_required(child, path + ".", optional)


def _children(field: Any, value: Any) -> Iterator[Message]:
    """The messages in a field that must be looked into."""
    kind = field.message_type
    if kind is None or kind.full_name in LEAVES or kind.GetOptions().map_entry:
        return
    if isinstance(value, Message):
        yield value
    else:
        yield from value


def _behaviours(field: Any) -> list[int]:
    return list(field.GetOptions().Extensions[field_behavior_pb2.field_behavior])
