"""Checks of what a caller gives, before anything has a side effect."""

import asyncio
import math
from collections.abc import Sequence

from forkpoint.chat import PromptIds
from forkpoint.errors import (
    ContextFullError,
    DurabilityNotReachedError,
    InvalidFieldError,
    NotUtf8Error,
    TokenOutOfRangeError,
)
from forkpoint.ids import SessionName, check_id
from forkpoint.limits import (
    ENCODE_HERE_BYTES,
    FORK_CHILDREN_MAX,
    GENERATE_TOKENS_MAX,
    INPUT_TOKENS_MAX,
    LABEL_BYTES_MAX,
    LABELS_MAX,
    STOP_STRING_BYTES_MAX,
    STOP_STRINGS_MAX,
    TEXT_BYTES_MAX,
)
from forkpoint.server.session.api import ForkCall, GenerateCall, Input
from forkpoint.server.session.ports import TextCodec
from forkpoint.statestore.records import CheckpointPolicy, Durability

SEED_RANGE = range(-(2**63), 2**63)
RANKS = {Durability.MEMORY: 0, Durability.LOCAL_FSYNC: 1, Durability.REPLICATED: 2}


def input_ids(given: Input, codec: TextCodec, vocab_size: int) -> PromptIds:
    """The input's token ids; none when there is no input.

    Raises TokenOutOfRangeError, NotUtf8Error, InvalidFieldError (too large, unknown role, two inputs).
    """
    kinds = [given.token_ids is not None, given.text is not None, given.chat is not None]
    if sum(kinds) > 1:
        raise InvalidFieldError("input", "give one of token ids, text and messages")
    if given.token_ids is not None:
        check_tokens(given.token_ids, vocab_size)
        prompt = PromptIds(given.token_ids)
    elif given.text is not None:
        check_text("text", given.text)
        prompt = PromptIds(tuple(codec.encode_text(given.text)))
    elif given.chat is not None:
        for turn in given.chat.turns:
            check_text("messages", turn.text)
        prompt = codec.render_chat(given.chat)
    else:
        return PromptIds(())
    if (count := len(prompt.opening) + len(prompt.ids)) > INPUT_TOKENS_MAX:
        raise InvalidFieldError("input", f"{count} tokens, at most {INPUT_TOKENS_MAX}")
    return prompt


async def prompt_of(given: Input, codec: TextCodec, vocab_size: int) -> PromptIds:
    """As `input_ids`. The event loop serves others while long text is encoded."""
    turns = () if given.chat is None else given.chat.turns
    if len(given.text or b"") + sum(len(turn.text) for turn in turns) <= ENCODE_HERE_BYTES:
        return input_ids(given, codec, vocab_size)
    return await asyncio.to_thread(input_ids, given, codec, vocab_size)


def check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises TokenOutOfRangeError."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for index, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            raise TokenOutOfRangeError(token_id, index, vocab_size)


def check_text(field: str, text: bytes) -> None:
    """Raises NotUtf8Error, InvalidFieldError."""
    if len(text) > TEXT_BYTES_MAX:
        raise InvalidFieldError(field, f"{len(text)} bytes, at most {TEXT_BYTES_MAX}")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise NotUtf8Error(field, error.start) from None


def check_room(name: SessionName, head: int, count: int, context_limit: int) -> None:
    """Raises ContextFullError when `count` more tokens exceed the model's context limit."""
    if head + count > context_limit:
        raise ContextFullError(str(name), head + count, context_limit)


def check_durability(asked: Durability | None, reached: Durability) -> None:
    """Raises DurabilityNotReachedError when the store gives less than asked."""
    if asked is not None and RANKS[asked] > RANKS[reached]:
        raise DurabilityNotReachedError(asked.value, reached.value)


def check_generate(call: GenerateCall, vocab_size: int) -> None:
    """Raises InvalidFieldError, TokenOutOfRangeError."""
    if not 0 <= call.max_tokens <= GENERATE_TOKENS_MAX:
        raise InvalidFieldError("max_tokens", f"{call.max_tokens} is not within 0 to {GENERATE_TOKENS_MAX}")
    for field, value, low, high in (
        ("temperature", call.temperature, 0.0, 100.0),
        ("top_p", call.top_p, 0.0, 1.0),
        ("min_p", call.min_p, 0.0, 1.0),
    ):
        if not (math.isfinite(value) and low <= value <= high):
            raise InvalidFieldError(field, f"{value} is not within {low} to {high}")
    if call.top_p == 0.0:
        raise InvalidFieldError("top_p", "0 leaves no token; 1 switches it off")
    if call.top_k < 0:
        raise InvalidFieldError("top_k", f"{call.top_k} is negative; 0 switches it off")
    if call.seed is not None:
        check_seed(call.seed)
    if len(call.stop_text) > STOP_STRINGS_MAX or len(call.stop_ids) > vocab_size:
        raise InvalidFieldError("stop_text", f"at most {STOP_STRINGS_MAX} stop strings and {vocab_size} stop ids")
    for stop in call.stop_text:
        if not 1 <= len(stop) <= STOP_STRING_BYTES_MAX:
            raise InvalidFieldError("stop_text", f"a stop string has 1 to {STOP_STRING_BYTES_MAX} bytes")
    check_tokens(call.stop_ids, vocab_size)


def check_seed(seed: int) -> None:
    """Raises InvalidFieldError."""
    if seed not in SEED_RANGE:
        raise InvalidFieldError("seed", f"{seed} is no signed 64-bit number")


def check_policy(policy: CheckpointPolicy) -> None:
    """Raises InvalidFieldError."""
    if policy.every_tokens < 0:
        raise InvalidFieldError(
            "checkpoint_policy.every_tokens", f"{policy.every_tokens} is negative; 0 switches it off"
        )


def check_labels(labels: dict[str, str]) -> None:
    """Raises InvalidFieldError."""
    if len(labels) > LABELS_MAX:
        raise InvalidFieldError("labels", f"{len(labels)} labels, at most {LABELS_MAX}")
    for key, value in labels.items():
        if len(key.encode()) > LABEL_BYTES_MAX or len(value.encode()) > LABEL_BYTES_MAX:
            raise InvalidFieldError("labels", f"{key[:40]!r} is longer than {LABEL_BYTES_MAX} bytes")


def check_fork(call: ForkCall) -> None:
    """Raises InvalidFieldError."""
    if not 1 <= call.count <= FORK_CHILDREN_MAX:
        raise InvalidFieldError("count", f"{call.count} is not within 1 to {FORK_CHILDREN_MAX}")
    if call.session_ids and len(call.session_ids) != call.count:
        raise InvalidFieldError("session_ids", f"{len(call.session_ids)} ids for {call.count} children")
    for session_id in call.session_ids:
        check_id(session_id, "session_ids")
    if call.seeds not in ("", "inherit", "derive"):
        raise InvalidFieldError("seed_policy", f"{call.seeds!r} is neither inherit nor derive")
    if call.position is not None and call.position < 0:
        raise InvalidFieldError("position", f"{call.position} is negative")
