"""Requests to the session layer's plain values. Whatever can be judged without looking at a session is judged here."""

import math
from collections.abc import Mapping, Sequence

from google.protobuf.duration_pb2 import Duration

from forkpoint.chat import Chat, ChatTurn
from forkpoint.clock import Clock
from forkpoint.errors import DurabilityNotReachedError, InvalidFieldError, NotUtf8Error, TokenOutOfRangeError
from forkpoint.ids import SessionName, check_id, new_id
from forkpoint.limits import (
    APPEND_TEXT_BYTES_MAX,
    CHAT_NAME_BYTES_MAX,
    CHECKPOINTS_KEPT_MAX,
    CHECKPOINTS_KEPT_MIN,
    DIGEST_BYTES,
    FORK_CHILDREN_MAX,
    GENERATE_TOKENS_MAX,
    INPUT_TOKENS_MAX,
    LABEL_BYTES_MAX,
    LABELS_MAX,
    STANDBYS_MAX,
    STOP_STRING_BYTES_MAX,
    STOP_STRINGS_MAX,
    TILE_TOKENS,
)
from forkpoint.proto.forkpoint.v1 import common_pb2, session_service_pb2
from forkpoint.proto.forkpoint.v1.checkpoint_pb2 import CreateCheckpointRequest
from forkpoint.proto.forkpoint.v1.session_pb2 import Session
from forkpoint.server.rpc.identity import request_key
from forkpoint.server.rpc.served import Served
from forkpoint.server.session.api import AppendCall, ForkCall, GenerateCall, Input
from forkpoint.statestore.records import CheckpointPolicy, Durability

TTL_US_LIMIT = 100 * 366 * 24 * 3600 * 1_000_000
_RANKS = {Durability.MEMORY: 1, Durability.LOCAL_FSYNC: 2, Durability.REPLICATED: 3}
_SEEDS = {common_pb2.SEED_POLICY_UNSPECIFIED: "", common_pb2.INHERIT: "inherit", common_pb2.DERIVE: "derive"}


def child_id(value: str, field: str, prefix: str) -> str:
    """A client's id for a new resource, or a fresh one when it gave none."""
    return check_id(value, field) if value else new_id(prefix)


def labels(values: Mapping[str, str], field: str) -> dict[str, str]:
    """Checked labels."""
    if len(values) > LABELS_MAX:
        raise InvalidFieldError(field, f"{len(values)} labels, at most {LABELS_MAX} are kept")
    for key, value in values.items():
        if not key:
            raise InvalidFieldError(field, "a label's key is empty")
        if max(len(key.encode()), len(value.encode())) > LABEL_BYTES_MAX:
            raise InvalidFieldError(f"{field}.{key[:32]}", f"longer than {LABEL_BYTES_MAX} bytes")
    return dict(values)


def policy(message: common_pb2.CheckpointPolicy, default: CheckpointPolicy, field: str) -> CheckpointPolicy:
    """A checkpoint policy; an unset interval is `default`'s."""
    every = message.every_tokens if message.HasField("every_tokens") else default.every_tokens
    if every < 0 or every % TILE_TOKENS:
        raise InvalidFieldError(f"{field}.every_tokens", f"{every} is no multiple of {TILE_TOKENS} (0 is off)")
    keep = message.keep_last
    if keep and not CHECKPOINTS_KEPT_MIN <= keep <= CHECKPOINTS_KEPT_MAX:
        bounds = f"{CHECKPOINTS_KEPT_MIN} to {CHECKPOINTS_KEPT_MAX}, or 0 for the server's default"
        raise InvalidFieldError(f"{field}.keep_last", f"{keep} is not in {bounds}")
    return CheckpointPolicy(every_tokens=every, on_turn_end=message.on_turn_end, keep_last=keep)


def expire_us(resource: Session | CreateCheckpointRequest, prefix: str, clock: Clock) -> int | None:
    """When a session or checkpoint expires, in microseconds since 1970; None when it says nothing. `prefix`: of the
    fields' names, with its dot."""
    kind = resource.WhichOneof("expiration")
    if kind == "ttl":
        return after(resource.ttl, f"{prefix}ttl", clock)
    if kind == "expire_time":
        when: int = resource.expire_time.ToMicroseconds()
        if when <= clock.wall_us():
            raise InvalidFieldError(f"{prefix}expire_time", "lies in the past")
        return when
    return None


def after(ttl: Duration, field: str, clock: Clock) -> int:
    """The time `ttl` from now, in microseconds since 1970."""
    length: int = ttl.ToMicroseconds()
    if not 0 < length < TTL_US_LIMIT:
        raise InvalidFieldError(field, "is not above 0 and below 100 years")
    return clock.wall_us() + length


def position(value: int, field: str) -> int:
    """A position that could exist."""
    if value < 0:
        raise InvalidFieldError(field, f"{value} is negative")
    return value


def reached(asked: "common_pb2.Durability.ValueType", served: Served) -> Durability | None:
    """The durability class asked for; None when the call leaves it to the store. DurabilityNotReachedError."""
    if asked == common_pb2.DURABILITY_UNSPECIFIED:
        return None
    if asked not in common_pb2.Durability.values():
        raise InvalidFieldError("durability", f"{asked} is no durability class")
    durability = Durability[common_pb2.Durability.Name(asked)]
    if _RANKS[durability] > _RANKS[served.durability]:
        raise DurabilityNotReachedError(durability.value, served.durability.value)
    return durability


def text(value: bytes, field: str) -> bytes:
    """UTF-8 text."""
    try:
        value.decode()
    except UnicodeDecodeError as error:
        raise NotUtf8Error(field, error.start) from error
    return value


def append_input(
    message: session_service_pb2.AppendRequest, field: str = "", text_bytes_max: int = APPEND_TEXT_BYTES_MAX
) -> Input:
    """The input of an append or a generation; Input() when the message has none."""
    kind = message.WhichOneof("input")
    if kind == "tokens":
        ids = tuple(message.tokens.ids)
        if len(ids) > INPUT_TOKENS_MAX:
            raise InvalidFieldError(f"{field}tokens", f"{len(ids)} tokens, at most {INPUT_TOKENS_MAX} in one call")
        return Input(token_ids=ids)
    if kind == "text_utf8":
        _check_size(len(message.text_utf8), f"{field}text_utf8", text_bytes_max)
        return Input(text=text(message.text_utf8, f"{field}text_utf8"))
    if kind == "messages":
        return Input(chat=_chat(message.messages, f"{field}messages", text_bytes_max))
    return Input()


def _chat(message: common_pb2.ChatMessages, field: str, text_bytes_max: int) -> Chat:
    turns = tuple(ChatTurn(turn.role, turn.text_utf8, turn.name) for turn in message.messages)
    _check_size(sum(len(turn.text) + len(turn.name) for turn in turns), field, text_bytes_max)
    for index, turn in enumerate(turns):
        text(turn.text, f"{field}.messages[{index}].text_utf8")
        if len(turn.name.encode()) > CHAT_NAME_BYTES_MAX:
            raise InvalidFieldError(f"{field}.messages[{index}].name", f"longer than {CHAT_NAME_BYTES_MAX} bytes")
    thinking = message.thinking if message.HasField("thinking") else None
    return Chat(turns, message.add_generation_prompt, thinking, message.thinking_effort)


def _check_size(size: int, field: str, limit: int) -> None:
    if size > limit:
        raise InvalidFieldError(field, f"{size} bytes, at most {limit} in one call (UploadAppend takes more)")


def head_hash(value: bytes, field: str) -> bytes | None:
    """An expected head hash, None when unset."""
    if value and len(value) != DIGEST_BYTES:
        raise InvalidFieldError(field, f"{len(value)} bytes, a head hash has {DIGEST_BYTES}")
    return value or None


def append_call(message: session_service_pb2.AppendRequest, served: Served, text_bytes_max: int) -> AppendCall:
    """An Append."""
    name = SessionName.parse(message.name)
    given = append_input(message, text_bytes_max=text_bytes_max)
    if given == Input():
        raise InvalidFieldError("input", "is required: tokens, text_utf8 or messages")
    return AppendCall(
        name=name,
        input=given,
        expected_position=_expected(message.expected_position, message.HasField("expected_position")),
        expected_head_hash=head_hash(message.expected_head_hash, "expected_head_hash"),
        durability=reached(message.durability, served),
        request=request_key(message, name.workflow, message.request_id),
    )


def _expected(value: int, present: bool) -> int | None:
    return position(value, "expected_position") if present else None


def generate_call(message: session_service_pb2.GenerateRequest, served: Served) -> GenerateCall:
    """A Generate. Without a request id it gets one of its own."""
    name = SessionName.parse(message.name)
    if message.input.name not in ("", message.name):
        raise InvalidFieldError("input.name", "is not the session of the call")
    reached(message.input.durability, served)
    expected = {
        position(holder.expected_position, "expected_position")
        for holder in (message, message.input)
        if holder.HasField("expected_position")
    }
    if len(expected) > 1:
        raise InvalidFieldError("input.expected_position", "differs from expected_position")
    if not 0 <= message.max_tokens <= GENERATE_TOKENS_MAX:
        raise InvalidFieldError("max_tokens", f"{message.max_tokens} is not in 0 … {GENERATE_TOKENS_MAX}")
    sampling = message.sampling
    _check_sampling(sampling)
    key = request_key(message, name.workflow, message.request_id or new_id("g"))
    assert key is not None
    return GenerateCall(
        name=name,
        request=key,
        input=append_input(message.input, "input."),
        expected_position=expected.pop() if expected else None,
        expected_head_hash=head_hash(message.input.expected_head_hash, "input.expected_head_hash"),
        resume_position=position(message.resume_position, "resume_position")
        if message.HasField("resume_position")
        else None,
        max_tokens=message.max_tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        stop_text=_stop_text(message.stop_text),
        stop_ids=_stop_ids(message.stop_ids, served.vocab_size),
        logprobs=message.logprobs,
        cancel_on_disconnect=message.cancel_on_disconnect,
    )


def _check_sampling(sampling: common_pb2.Sampling) -> None:
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise InvalidFieldError("sampling.temperature", f"{sampling.temperature} is not a number from 0 on")
    if sampling.top_k < 0:
        raise InvalidFieldError("sampling.top_k", f"{sampling.top_k} is negative")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise InvalidFieldError("sampling.top_p", f"{sampling.top_p} is not above 0 and at most 1")
    if not 0 <= sampling.min_p < 1:
        raise InvalidFieldError("sampling.min_p", f"{sampling.min_p} is not from 0 on and below 1")


def _stop_text(stops: Sequence[bytes]) -> tuple[bytes, ...]:
    if len(stops) > STOP_STRINGS_MAX:
        raise InvalidFieldError("stop_text", f"{len(stops)} stop texts, at most {STOP_STRINGS_MAX}")
    for index, stop in enumerate(stops):
        if not 0 < len(stop) <= STOP_STRING_BYTES_MAX:
            raise InvalidFieldError(f"stop_text[{index}]", f"{len(stop)} bytes, not in 1 … {STOP_STRING_BYTES_MAX}")
        text(stop, f"stop_text[{index}]")
    return tuple(stops)


def _stop_ids(ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    for index, token_id in enumerate(ids):
        if token_id >= vocab_size:
            raise TokenOutOfRangeError(token_id, index, vocab_size)
    return tuple(ids)


def fork_call(message: session_service_pb2.ForkRequest, clock: Clock) -> ForkCall:
    """A Fork."""
    name = SessionName.parse(message.name)
    ids = tuple(check_id(value, f"session_ids[{index}]") for index, value in enumerate(message.session_ids))
    if len(set(ids)) != len(ids):
        raise InvalidFieldError("session_ids", "an id is there twice")
    count = message.count or len(ids) or 1
    if not 1 <= count <= FORK_CHILDREN_MAX:
        raise InvalidFieldError("count", f"{count} is not in 1 … {FORK_CHILDREN_MAX}")
    if ids and len(ids) != count:
        raise InvalidFieldError("session_ids", f"{len(ids)} ids for {count} children")
    if message.seed_policy not in _SEEDS:
        raise InvalidFieldError("seed_policy", f"{message.seed_policy} is no seed policy")
    return ForkCall(
        name=name,
        count=count,
        position=position(message.position, "position") if message.HasField("position") else None,
        session_ids=ids,
        seeds=_SEEDS[message.seed_policy],
        transient=message.transient,
        expire_us=after(message.ttl, "ttl", clock) if message.HasField("ttl") else None,
        request=request_key(message, name.workflow, message.request_id),
    )


def standbys(count: int, field: str) -> int:
    """How many standbys are asked for. Raises InvalidFieldError."""
    if not 0 <= count <= STANDBYS_MAX:
        raise InvalidFieldError(field, f"{count} is not within 0 to {STANDBYS_MAX}")
    return count
