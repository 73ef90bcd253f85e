"""Generations: durable rows that, with the log, decide every next token."""

from typing import Any, Final

from forkpoint.errors import AlreadyExistsError, EmptySessionError, NotFoundError
from forkpoint.ids import SessionName
from forkpoint.statestore.calls import AppendOutcome, AppendTokens, BeginGeneration, BeginOutcome
from forkpoint.statestore.records import FinishReason, GenerationParams, GenerationRow, Kind
from forkpoint.statestore.rowjson import params_from_json, params_to_json
from forkpoint.statestore.sqlite import log, requests, sessions
from forkpoint.statestore.sqlite.tx import Tx

_COLUMNS: Final = "workflow, session, generation, branch, request_id, start, params, finish, stop, input_start"
_SELECT: Final = f"SELECT {_COLUMNS} FROM generations"


def append(tx: Tx, call: AppendTokens) -> AppendOutcome:
    """Catalog.append."""
    answer = requests.find(tx, call.request, "append")
    if answer is not None:
        start, head, head_hash, epoch = answer
        return AppendOutcome(start, head, bytes.fromhex(head_hash), epoch, True)
    stored = sessions.live(tx, call.session)
    chain = log.append_at_head(
        tx,
        stored,
        call.epoch,
        call.token_ids,
        call.kind,
        call.expected_position,
        call.expected_head_hash,
        call.logprobs,
    )
    outcome = AppendOutcome(stored.row.head, chain.position, chain.head_hash(), call.epoch, False)
    if call.past is not None:
        past = call.past
        _insert(tx, stored, past.generation, past.request_id, outcome.start, past.params, past.input_start)
        tx.run(
            "UPDATE generations SET finish = ?, stop = ? WHERE workflow = ? AND session = ? AND generation = ?",
            past.finish.value,
            outcome.head,
            call.session.workflow,
            call.session.session,
            past.generation,
        )
    requests.store(tx, call.request, "append", [outcome.start, outcome.head, outcome.head_hash.hex(), outcome.epoch])
    return outcome


def begin(tx: Tx, call: BeginGeneration) -> BeginOutcome:
    """Catalog.begin_generation."""
    answer = requests.find(tx, call.request, "begin_generation")
    if answer is not None:
        generation, head, head_hash, epoch = answer
        row = _find(tx, call.session, generation)
        return BeginOutcome(row, head, bytes.fromhex(head_hash), epoch, True)
    stored = sessions.live(tx, call.session)
    name = call.session
    chain = log.append_at_head(
        tx, stored, call.epoch, call.token_ids, Kind.PROMPT, call.expected_position, call.expected_head_hash
    )
    request_id = "" if call.request is None else call.request.request_id
    input_start = stored.row.head if call.token_ids else None
    _insert(tx, stored, call.generation, request_id, chain.position, call.params, input_start)
    tx.run(
        "UPDATE sessions SET open_generation = ?, update_us = ? WHERE workflow = ? AND session = ?",
        call.generation,
        tx.now_us,
        name.workflow,
        name.session,
    )
    outcome = BeginOutcome(_find(tx, name, call.generation), chain.position, chain.head_hash(), call.epoch, False)
    requests.store(
        tx, call.request, "begin_generation", [call.generation, outcome.head, outcome.head_hash.hex(), outcome.epoch]
    )
    return outcome


def _insert(
    tx: Tx,
    stored: sessions.StoredSession,
    generation: str,
    request_id: str,
    start: int,
    params: GenerationParams,
    input_start: int | None,
) -> None:
    """A row without an end. Raises EmptySessionError, AlreadyExistsError."""
    name = stored.row.name
    if start == 0:
        raise EmptySessionError(str(name))
    by_key = "workflow = ? AND session = ? AND generation = ?"
    if tx.one(f"SELECT 1 FROM generations WHERE {by_key}", name.workflow, name.session, generation):
        raise AlreadyExistsError(f"{name} generation {generation}")
    tx.run(
        f"INSERT INTO generations ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, NULL, NULL, ?)",
        name.workflow,
        name.session,
        generation,
        stored.branch,
        request_id,
        start,
        params_to_json(params),
        input_start,
    )


def open_one(tx: Tx, name: SessionName) -> GenerationRow | None:
    """Catalog.open_generation."""
    generation = sessions.live(tx, name).open_generation
    return None if generation is None else _find(tx, name, generation)


def get(tx: Tx, name: SessionName, generation: str) -> GenerationRow:
    """Catalog.get_generation."""
    sessions.live(tx, name)
    return _find(tx, name, generation)


def list_own(tx: Tx, name: SessionName) -> list[GenerationRow]:
    """Catalog.list_generations."""
    branch = sessions.live(tx, name).branch
    return [_row(row) for row in tx.rows(f"{_SELECT} WHERE branch = ? ORDER BY start, generation", branch)]


def _find(tx: Tx, name: SessionName, generation: str) -> GenerationRow:
    row = tx.one(
        f"{_SELECT} WHERE workflow = ? AND session = ? AND generation = ?", name.workflow, name.session, generation
    )
    if row is None:
        raise NotFoundError(f"{name} generation {generation}")
    return _row(row)


def _row(row: tuple[Any, ...]) -> GenerationRow:
    workflow, session, generation, branch, request_id, start, params, finish, stop, input_start = row
    return GenerationRow(
        generation=generation,
        session=SessionName(workflow, session),
        request_id=request_id,
        start=start,
        params=params_from_json(params),
        finish=None if finish is None else FinishReason(finish),
        end=stop,
        input_start=input_start,
        branch=str(branch),
    )
