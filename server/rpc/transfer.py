"""Export and Import: a session's log and generations as a stream of chunks (export.proto tells their order)."""

import math
from collections.abc import AsyncIterator, Sequence
from typing import Final

from forkpoint.clock import Clock
from forkpoint.errors import InvalidFieldError, StateIncompatibleError
from forkpoint.ids import SessionName, parse_workflow
from forkpoint.proto.forkpoint.v1 import common_pb2, export_pb2
from forkpoint.server.rpc import requests, responses
from forkpoint.server.rpc.identity import request_key
from forkpoint.server.rpc.served import Served
from forkpoint.server.rpc.stream import closed_after
from forkpoint.server.session.api import ExportedSession, SessionNode, SessionView
from forkpoint.statestore.records import (
    CheckpointPolicy,
    FinishReason,
    GenerationParams,
    GenerationRow,
    LogSlice,
    SamplingParams,
    SessionRow,
    SessionState,
)

FORMAT_VERSION: Final = 1
SLICE_TOKENS_MAX: Final = 65_536
"""Tokens of one chunk: at most 13 bytes each on the wire."""
GENERATIONS_MAX: Final = 1_000_000
"""Generations of one import: fewer than tokens, and kept in memory while it runs."""
_KINDS = {number: kind for kind, number in responses.KINDS.items()}


async def export_chunks(node: SessionNode, name: SessionName) -> AsyncIterator[export_pb2.ExportChunk]:
    """Header, generations, slices, trailer. The log ends at the header's head, whatever is generated meanwhile."""
    exported = await node.export_head(name)
    row = exported.row
    yield export_pb2.ExportChunk(header=_header(exported))
    for generation in exported.generations:
        yield export_pb2.ExportChunk(generation=_generation(generation))
    position = 0
    async with closed_after(node.export_log(name)) as pieces:
        async for piece in pieces:
            for chunk in _slices(piece, row.head):
                position = chunk.start + len(chunk.token_ids)
                yield export_pb2.ExportChunk(slice=chunk)
            if position >= row.head:
                break
    yield export_pb2.ExportChunk(trailer=export_pb2.ExportTrailer(head=row.head, head_hash=row.head_hash))


def _slices(piece: LogSlice, head: int) -> list[export_pb2.ExportSlice]:
    slices = []
    length = min(len(piece.token_ids), head - piece.start)
    for begin in range(0, length, SLICE_TOKENS_MAX):
        end = min(begin + SLICE_TOKENS_MAX, length)
        slices.append(
            export_pb2.ExportSlice(
                start=piece.start + begin,
                token_ids=piece.token_ids[begin:end],
                kinds=[responses.KINDS[kind] for kind in piece.kinds[begin:end]],
                logprobs=responses.logprobs(piece.logprobs[begin:end]),
            )
        )
    return slices


def _header(exported: ExportedSession) -> export_pb2.ExportHeader:
    row = exported.row
    return export_pb2.ExportHeader(
        format_version=FORMAT_VERSION,
        namespace=exported.namespace,
        model=common_pb2.ModelRef(model_digest=exported.model_digest, tokenizer_digest=exported.tokenizer_digest),
        source_name=str(row.name),
        head=row.head,
        head_hash=row.head_hash,
        seed=row.seed,
        checkpoint_policy=responses.policy(row.policy),
        labels=row.labels,
        transient=row.transient,
    )


def _generation(row: GenerationRow) -> export_pb2.ExportGeneration:
    params = row.params
    return export_pb2.ExportGeneration(
        generation=row.generation,
        request_id=row.request_id,
        start=row.start,
        end=row.end,
        reason=responses.finish_reason(row.finish),
        input_start=row.input_start,
        sampling=responses.sampling(params.sampling),
        max_tokens=params.max_tokens,
        stop_text=params.stop_text,
        stop_ids=params.stop_ids,
        logprobs=params.logprobs,
    )


async def import_stream(
    node: SessionNode, chunks: AsyncIterator[export_pb2.ExportChunk], served: Served, clock: Clock
) -> SessionView:
    """Make a session from target, header, generations, slices and trailer. Raises InvalidFieldError for chunks out of
    order or a stream that is cut off, StateIncompatibleError for another model."""
    target = (await _part(chunks, "target")).target
    workflow = parse_workflow(target.parent, "target.parent")
    name = SessionName(workflow, requests.child_id(target.session_id, "target.session_id", "s"))
    header = (await _part(chunks, "header")).header
    if header.format_version != FORMAT_VERSION:
        raise StateIncompatibleError("format version of the export", str(header.format_version), str(FORMAT_VERSION))
    for what, stored, ours in (
        ("model digest", header.model.model_digest, served.model_digest),
        ("tokenizer digest", header.model.tokenizer_digest, served.tokenizer_digest),
    ):
        if stored != ours:
            raise StateIncompatibleError(what, stored.hex(), ours.hex())
    generations: list[export_pb2.ExportGeneration] = []
    chunk = await anext(chunks, None)
    while chunk is not None and chunk.WhichOneof("part") == "generation":
        if len(generations) == GENERATIONS_MAX:
            raise InvalidFieldError("generation", f"more than {GENERATIONS_MAX} generations")
        generations.append(chunk.generation)
        chunk = await anext(chunks, None)
    key = request_key(target, workflow, target.request_id, header, *generations)
    exported = _exported(header, generations, name, clock.wall_us(), served)
    return await node.import_session(name, exported, _log(chunk, chunks, header), key)


async def _part(chunks: AsyncIterator[export_pb2.ExportChunk], kind: str) -> export_pb2.ExportChunk:
    chunk = await anext(chunks, None)
    if chunk is None or chunk.WhichOneof("part") != kind:
        raise InvalidFieldError(kind, f"expected here, got {chunk.WhichOneof('part') if chunk else 'the end'}")
    return chunk


async def _log(
    chunk: export_pb2.ExportChunk | None,
    chunks: AsyncIterator[export_pb2.ExportChunk],
    header: export_pb2.ExportHeader,
) -> AsyncIterator[LogSlice]:
    """The slices, of which `chunk` is the first, checked to be whole and without gaps."""
    position = 0
    while chunk is not None and chunk.WhichOneof("part") == "slice":
        piece = chunk.slice
        if piece.start != position:
            raise InvalidFieldError("slice.start", f"{piece.start}, expected {position}")
        yield _slice(piece)
        position += len(piece.token_ids)
        chunk = await anext(chunks, None)
    if chunk is None or chunk.WhichOneof("part") != "trailer":
        raise InvalidFieldError("trailer", f"the stream is cut off at position {position} of {header.head}")
    if (chunk.trailer.head, chunk.trailer.head_hash) != (header.head, header.head_hash) or position != header.head:
        raise InvalidFieldError("trailer", f"{position} tokens came, the header says {header.head}")


def _slice(piece: export_pb2.ExportSlice) -> LogSlice:
    count = len(piece.token_ids)
    if len(piece.kinds) != count or len(piece.logprobs) not in (0, count):
        raise InvalidFieldError("slice", "token_ids, kinds and logprobs differ in length")
    if any(kind not in _KINDS for kind in piece.kinds):
        raise InvalidFieldError("slice.kinds", "an unknown kind")
    logprobs: Sequence[float | None] = [None if math.isnan(value) else value for value in piece.logprobs]
    return LogSlice(
        start=piece.start,
        token_ids=tuple(piece.token_ids),
        kinds=tuple(_KINDS[kind] for kind in piece.kinds),
        logprobs=tuple(logprobs) or (None,) * count,
    )


def _exported(
    header: export_pb2.ExportHeader,
    generations: Sequence[export_pb2.ExportGeneration],
    name: SessionName,
    now_us: int,
    served: Served,
) -> ExportedSession:
    default = CheckpointPolicy(served.checkpoint_every)
    row = SessionRow(
        name=name,
        branch="",
        state=SessionState.ACTIVE,
        state_reason="",
        head=header.head,
        head_hash=header.head_hash,
        epoch=0,
        owner="",
        parent=None,
        fork_position=0,
        seed=header.seed,
        policy=requests.policy(header.checkpoint_policy, default, "header.checkpoint_policy"),
        labels=requests.labels(header.labels, "header.labels"),
        transient=header.transient,
        exact=True,
        numerics_ids=(),
        expire_us=None,
        create_us=now_us,
        update_us=now_us,
        delete_us=None,
        purge_us=None,
        revision=1,
    )
    return ExportedSession(
        row=row,
        model_digest=header.model.model_digest,
        tokenizer_digest=header.model.tokenizer_digest,
        namespace=header.namespace,
        generations=tuple(_row(generation, name) for generation in generations),
    )


def _row(message: export_pb2.ExportGeneration, name: SessionName) -> GenerationRow:
    reason = None
    if message.reason != common_pb2.FINISH_REASON_UNSPECIFIED:
        if message.reason not in common_pb2.FinishReason.values():
            raise InvalidFieldError("generation.reason", f"{message.reason} is no finish reason")
        reason = FinishReason[common_pb2.FinishReason.Name(message.reason)]
    sampling = message.sampling
    return GenerationRow(
        generation=message.generation,
        session=name,
        request_id=message.request_id,
        start=message.start,
        params=GenerationParams(
            sampling=SamplingParams(
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=sampling.seed,
            ),
            max_tokens=message.max_tokens,
            stop_text=tuple(message.stop_text),
            stop_ids=tuple(message.stop_ids),
            logprobs=message.logprobs,
        ),
        finish=reason,
        end=message.end if message.HasField("end") else None,
        input_start=message.input_start if message.HasField("input_start") else None,
    )
