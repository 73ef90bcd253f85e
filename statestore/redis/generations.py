"""Appends, and generations: durable rows that, with the log, decide every next token."""

from forkpoint.errors import (
    AlreadyExistsError,
    EmptySessionError,
    NotFoundError,
    StoreFullError,
    StoreUnavailableError,
)
from forkpoint.ids import SessionName
from forkpoint.statestore.calls import AppendOutcome, AppendTokens, BeginGeneration, BeginOutcome
from forkpoint.statestore.records import GenerationRow, Kind
from forkpoint.statestore.redis import sessions
from forkpoint.statestore.redis.access import TRIES, Access
from forkpoint.statestore.redis.acknowledged import note
from forkpoint.statestore.redis.functions import Answer, Refusal
from forkpoint.statestore.redis.hashes import fields_of, flat_of, generation_of
from forkpoint.statestore.redis.proposals import ask, propose
from forkpoint.statestore.redis.refusals import session_error
from forkpoint.statestore.rowjson import params_to_json
from forkpoint.statestore.rules import check_expected


async def append(access: Access, call: AppendTokens) -> AppendOutcome:
    """Catalog.append."""
    past, fields = call.past, dict[str, str | int | None]()
    if past is not None:
        fields = {
            "request": past.request_id,
            "params": params_to_json(past.params),
            "finish": past.finish.value,
            "input": past.input_start,
        }
    answer = await _extend(access, call, "append", call.kind, past.generation if past else "", fields)
    start, head, head_hash, epoch = answer.value[:4]
    return AppendOutcome(int(start), int(head), bytes(head_hash), int(epoch), answer.replayed)


async def begin(access: Access, call: BeginGeneration) -> BeginOutcome:
    """Catalog.begin_generation."""
    request_id = "" if call.request is None else call.request.request_id
    fields: dict[str, str | int | None] = {"request": request_id, "params": params_to_json(call.params)}
    answer = await _extend(access, call, "begin_generation", Kind.PROMPT, call.generation, fields)
    start, head, head_hash, epoch, branch, generation = answer.value
    if answer.replayed:
        row = await find(access, call.session, bytes(generation).decode())
    else:
        row = GenerationRow(
            generation=call.generation,
            session=call.session,
            request_id=request_id,
            start=int(head),
            params=call.params,
            input_start=int(start) if call.token_ids else None,
            branch=bytes(branch).decode(),
        )
    return BeginOutcome(row, int(head), bytes(head_hash), int(epoch), answer.replayed)


async def _extend(
    access: Access,
    call: AppendTokens | BeginGeneration,
    function: str,
    kind: Kind,
    generation: str,
    fields: dict[str, str | int | None],
) -> Answer:
    """Propose until the head is as this process knows it, or the call is refused. One round trip for a session that
    this process wrote to last."""
    name, base = call.session, access.keys.workflow(call.session.workflow)
    request = access.request_in(name.workflow, call.request)
    position = "" if call.expected_position is None else call.expected_position
    logprobs = call.logprobs if isinstance(call, AppendTokens) else ()
    begins = function == "begin_generation"
    token = ""
    for _ in range(TRIES):
        known = access.heads.get(name)
        if known is None or call.epoch < 0:
            proposal = ask(access.root)
        else:
            proposal = propose(known, call.epoch, kind, call.token_ids, logprobs)
        if begins and call.token_ids:
            fields["input"] = proposal.known.chain.position
        known_hash, new_hash = proposal.known.chain.head_hash(), proposal.head.chain.head_hash()
        expected_hash = call.expected_head_hash or b""
        try:
            answer = await access.functions.write(
                base,
                function,
                request,
                name.session,
                call.epoch,
                position,
                expected_hash,
                known_hash,
                *proposal.arguments(),
                generation,
                *flat_of(**fields),
                token,
                new_hash,
            )
        except Refusal as refusal:
            if refusal.status == "MOVED":
                await note(access, name, refusal.details)
            elif refusal.status == "UNLISTED":
                token = await sessions.list_generating(access, name.workflow)
            else:
                raise _error(refusal, call, generation, known_hash) from None
            continue
        except (StoreUnavailableError, StoreFullError):
            access.heads.forget(name)
            raise
        if not answer.replayed:
            access.heads.set(name, proposal.head)
        return answer
    raise StoreUnavailableError(access.functions.connection.shown, f"{name}: others wrote first, {TRIES} times")


def _error(refusal: Refusal, call: AppendTokens | BeginGeneration, generation: str, known_hash: bytes) -> Exception:
    """Why an append was refused for good."""
    name = call.session
    match refusal.status:
        case "EMPTY":
            return EmptySessionError(str(name))
        case "GENERATION_EXISTS":
            return AlreadyExistsError(f"{name} generation {generation}")
        case "UNEXPECTED":
            head, rewound_from = refusal.number(0), refusal.number(1)
            check_expected(name, head, known_hash, rewound_from, call.expected_position, call.expected_head_hash)
    return session_error(refusal, name, call.epoch)


async def open_one(access: Access, name: SessionName) -> GenerationRow | None:
    """Catalog.open_generation."""
    try:
        generation, flat = await access.functions.ask(
            access.keys.workflow(name.workflow), "open_generation", name.session
        )
    except Refusal as refusal:
        raise session_error(refusal, name) from None
    return _row(name, bytes(generation).decode(), flat) if generation else None


async def get(access: Access, name: SessionName, generation: str) -> GenerationRow:
    """Catalog.get_generation."""
    try:
        _, flat = await access.functions.ask(
            access.keys.workflow(name.workflow), "get_generation", name.session, generation
        )
    except Refusal as refusal:
        raise session_error(refusal, name) from None
    return _row(name, generation, flat)


async def find(access: Access, name: SessionName, generation: str) -> GenerationRow:
    """A generation, also of a deleted session. Raises NotFoundError."""
    base = access.keys.workflow(name.workflow)
    key = f"{base}:generation:{name.session}:{generation}"
    return _row(name, generation, await access.functions.look(base, "HGETALL", key))


async def list_own(access: Access, name: SessionName) -> list[GenerationRow]:
    """Catalog.list_generations."""
    try:
        (found,) = await access.functions.ask(access.keys.workflow(name.workflow), "list_generations", name.session)
    except Refusal as refusal:
        raise session_error(refusal, name) from None
    return [_row(name, bytes(generation).decode(), flat) for generation, flat in found]


def _row(name: SessionName, generation: str, flat: list[bytes]) -> GenerationRow:
    if not flat:
        raise NotFoundError(f"{name} generation {generation}")
    return generation_of(name, generation, fields_of(flat))
