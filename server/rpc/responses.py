"""The session layer's values to protobuf messages."""

import math
from collections.abc import Sequence
from typing import Final

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from forkpoint.proto.forkpoint.v1 import admin_pb2, checkpoint_pb2, common_pb2, session_pb2, session_service_pb2
from forkpoint.proto.forkpoint.v1.workflow_pb2 import Workflow
from forkpoint.server.rpc.served import Served
from forkpoint.server.session import api
from forkpoint.statestore.gcreport import CollectionReport
from forkpoint.statestore.records import (
    CheckpointPolicy,
    Durability,
    FinishReason,
    Kind,
    SamplingParams,
    WorkflowRow,
)

KINDS: dict[Kind, "common_pb2.Kind.ValueType"] = {
    Kind.PROMPT: common_pb2.PROMPT,
    Kind.GENERATED: common_pb2.GENERATED,
}

DROPPED_MAX: Final = 1000
"""Checkpoints that a dry run names: a message must hold them."""


def timestamp(microseconds: int | None) -> Timestamp | None:
    """A stored time; None stays unset."""
    if microseconds is None:
        return None
    stamp = Timestamp()
    stamp.FromMicroseconds(microseconds)
    return stamp


def durability(value: Durability) -> "common_pb2.Durability.ValueType":
    """A durability class."""
    return common_pb2.Durability.Value(value.value)


def finish_reason(value: FinishReason | None) -> "common_pb2.FinishReason.ValueType":
    """Why a generation ended; unspecified while it runs."""
    return common_pb2.FinishReason.Value(value.value) if value else common_pb2.FINISH_REASON_UNSPECIFIED


def usage(value: api.Usage) -> common_pb2.Usage:
    """Tokens by kind."""
    return common_pb2.Usage(prompt_tokens=value.prompt_tokens, generated_tokens=value.generated_tokens)


def policy(value: CheckpointPolicy) -> common_pb2.CheckpointPolicy:
    """A checkpoint policy."""
    return common_pb2.CheckpointPolicy(
        every_tokens=value.every_tokens, on_turn_end=value.on_turn_end, keep_last=value.keep_last
    )


def sampling(value: SamplingParams) -> common_pb2.Sampling:
    """Resolved sampling parameters."""
    return common_pb2.Sampling(
        temperature=value.temperature, top_k=value.top_k, top_p=value.top_p, min_p=value.min_p, seed=value.seed
    )


def model_ref(served: Served) -> common_pb2.ModelRef:
    """The served model."""
    return common_pb2.ModelRef(model_digest=served.model_digest, tokenizer_digest=served.tokenizer_digest)


def node_name(node: str) -> str:
    """A node's resource name; "" for nobody."""
    return f"nodes/{node}" if node and not node.startswith("nodes/") else node


def session(view: api.SessionView, served: Served) -> session_pb2.Session:
    """A session."""
    row = view.row
    estimate = Duration()
    estimate.FromMilliseconds(math.ceil(view.recovery_time_estimate_s * 1000))
    return session_pb2.Session(
        name=str(row.name),
        state=session_pb2.Session.State.Value(view.state),
        state_reason=row.state_reason,
        head=row.head,
        head_hash=row.head_hash,
        consumed=view.consumed,
        epoch=row.epoch,
        node=node_name(view.node),
        parent=str(row.parent) if row.parent else "",
        fork_position=row.fork_position,
        checkpoint_policy=policy(row.policy),
        recovery_time_estimate=estimate,
        expire_time=timestamp(row.expire_us),
        model=model_ref(served),
        exact=row.exact,
        numerics_ids=row.numerics_ids,
        usage=usage(view.usage),
        labels=row.labels,
        create_time=timestamp(row.create_us),
        update_time=timestamp(row.update_us),
        delete_time=timestamp(row.delete_us),
        purge_time=timestamp(row.purge_us),
        transient=row.transient,
        seed=row.seed,
        etag=str(row.revision),
        standbys=row.standbys,
    )


def move(report: api.MoveReport, served: Served) -> admin_pb2.MigrateProgress:
    """How far a move is."""
    progress = admin_pb2.MigrateProgress(
        restored_tokens=report.restored_tokens,
        lag_tokens=report.lag_tokens,
        phase=admin_pb2.MigrateProgress.Phase.Value(report.phase.value),
        target_node=node_name(report.target),
    )
    if report.view is not None:
        progress.session.CopyFrom(session(report.view, served))
        progress.pause.FromMicroseconds(round(report.pause_seconds * 1_000_000))
    return progress


def workflow(row: WorkflowRow) -> Workflow:
    """A workflow."""
    return Workflow(
        name=f"workflows/{row.workflow}",
        labels=row.labels,
        create_time=timestamp(row.create_us),
        update_time=timestamp(row.update_us),
        etag=str(row.revision),
        standbys=row.standbys,
    )


def node(view: api.NodeView) -> admin_pb2.Node:
    """A node's incarnation."""
    row, status = view.row, view.row.status
    return admin_pb2.Node(
        name=node_name(row.node),
        incarnation=row.incarnation,
        address=row.address,
        numerics_id=row.numerics_id,
        lease_counter=row.counter,
        state=admin_pb2.Node.State.Value(view.state.value),
        slots_total=status.slots_total,
        slots_free=status.slots_free,
        pages_total=status.pages_total,
        pages_free=status.pages_free,
        sessions=status.sessions,
        waiting=status.waiting,
        following=status.following,
    )


def append_result(result: api.AppendResult, served: Served) -> session_service_pb2.AppendResponse:
    """Where an append's tokens lie."""
    outcome = result.outcome
    return session_service_pb2.AppendResponse(
        start=outcome.start,
        head=outcome.head,
        head_hash=outcome.head_hash,
        epoch=outcome.epoch,
        durability=durability(served.durability),
        token_ids=result.token_ids,
        replayed=outcome.replayed,
    )


def logprobs(values: Sequence[float | None]) -> list[float]:
    """Log probabilities for the wire: none at all when no token has one, else NaN for those without."""
    if all(value is None for value in values):
        return []
    return [math.nan if value is None else value for value in values]


def chunk(value: api.Chunk) -> session_service_pb2.TokenChunk:
    """Durable tokens."""
    return session_service_pb2.TokenChunk(
        start=value.start,
        token_ids=value.token_ids,
        text_utf8=value.text,
        logprobs=logprobs(value.logprobs),
        kinds=[KINDS[kind] for kind in value.kinds],
        epoch=value.epoch,
    )


def started(event: api.Started, resume_position: int) -> session_service_pb2.Started:
    """First event of a generation's stream."""
    row = event.row
    return session_service_pb2.Started(
        request_id=row.request_id,
        start=row.start,
        head=event.head,
        epoch=event.epoch,
        sampling=sampling(row.params.sampling),
        max_tokens=row.params.max_tokens,
        input_start=row.input_start,
        resume_position=resume_position,
    )


def finished(event: api.Finished) -> session_service_pb2.Finished:
    """Last event of a generation's stream."""
    return session_service_pb2.Finished(
        reason=finish_reason(event.reason),
        head=event.head,
        head_hash=event.head_hash,
        usage=usage(event.usage),
        stop_position=event.stop_position,
    )


def checkpoint_part(part: api.CheckpointPart) -> checkpoint_pb2.CheckpointPart:
    """One part as stored."""
    return checkpoint_pb2.CheckpointPart(name=part.name, bytes=part.bytes, blake3=part.blake3)


def checkpoint(view: api.CheckpointView) -> checkpoint_pb2.Checkpoint:
    """A checkpoint with its parts."""
    row = view.row
    return checkpoint_pb2.Checkpoint(
        name=f"{row.session}/checkpoints/{row.checkpoint}",
        position=row.position,
        grid_position=row.grid_position,
        chain_hash=row.chain_hash,
        numerics_ids=view.numerics_ids,
        exact=len(view.numerics_ids) == 1,
        automatic=row.automatic,
        create_time=timestamp(row.create_us),
        parts=[checkpoint_part(part) for part in view.parts],
        bytes_total=sum(part.bytes for part in view.parts),
        bytes_stored=view.bytes_stored,
        bytes_shared=view.bytes_shared,
        expire_time=timestamp(row.expire_us),
        durability=durability(view.durability) if view.durability else common_pb2.DURABILITY_UNSPECIFIED,
    )


def progress(report: CollectionReport) -> admin_pb2.GcProgress:
    """A collection up to now."""
    dropped = [
        admin_pb2.DroppedCheckpoint(
            name=f"{verdict.row.session}/checkpoints/{verdict.row.checkpoint}", reason=verdict.reason.value
        )
        for verdict in (report.dropped[:DROPPED_MAX] if report.done else ())
    ]
    return admin_pb2.GcProgress(
        tier=report.tier,
        done=report.done,
        stopped=report.stopped,
        checkpoints_kept=report.checkpoints_kept,
        checkpoints_dropped={reason.value: count for reason, count in report.checkpoints_dropped.items()},
        manifests_kept=report.manifests_kept,
        manifests_removed=report.manifests_removed,
        blobs_marked=report.blobs_marked,
        blobs_waiting=report.blobs_waiting,
        blobs_spared=report.blobs_spared,
        blobs_deleted=report.blobs_deleted,
        bytes_deleted=report.bytes_deleted,
        blobs_evicted=report.blobs_evicted,
        bytes_evicted=report.bytes_evicted,
        bytes_over_budget=report.bytes_over_budget,
        dropped=dropped,
    )
