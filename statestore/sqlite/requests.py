"""Request ids: the stored answer of every mutating call, for 24 hours."""

import json
from typing import Any, Final

from forkpoint.errors import RequestIdReusedError
from forkpoint.limits import REQUEST_ID_KEEP_SECONDS
from forkpoint.statestore.records import RequestKey
from forkpoint.statestore.rowjson import dump
from forkpoint.statestore.sqlite.tx import Tx

KEEP_US: Final = REQUEST_ID_KEEP_SECONDS * 1_000_000
PURGE_MAX: Final = 8
"""Old ids forgotten with each new one: more than come in, few enough not to be felt."""


def find_text(tx: Tx, request: RequestKey | None, call: str | None = None) -> str | None:
    """The stored answer, None when there is none. RequestIdReusedError when it answered another digest or call."""
    if request is None:
        return None
    row = tx.one(
        "SELECT digest, result, call FROM requests"
        " WHERE caller = ? AND workflow = ? AND request_id = ? AND create_us > ?",
        request.caller,
        request.workflow,
        request.request_id,
        tx.now_us - KEEP_US,
    )
    if row is None:
        return None
    if row[0] != request.digest or call not in (None, row[2]):
        raise RequestIdReusedError(request.request_id)
    return str(row[1])


def find(tx: Tx, request: RequestKey | None, call: str) -> Any:
    """The stored answer as a JSON value, None when there is none. Raises RequestIdReusedError."""
    text = find_text(tx, request, call)
    return None if text is None else json.loads(text)


def store(tx: Tx, request: RequestKey | None, call: str, answer: Any) -> None:
    """Keep the answer of a call, in the transaction of the effect, and forget some old ones."""
    if request is None:
        return
    tx.run(
        "DELETE FROM requests WHERE (caller, workflow, request_id) IN"
        " (SELECT caller, workflow, request_id FROM requests WHERE create_us <= ? ORDER BY create_us LIMIT ?)",
        tx.now_us - KEEP_US,
        PURGE_MAX,
    )
    tx.run(
        "INSERT OR REPLACE INTO requests (caller, workflow, request_id, digest, call, result, create_us)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        request.caller,
        request.workflow,
        request.request_id,
        request.digest,
        call,
        dump(answer),
        tx.now_us,
    )
