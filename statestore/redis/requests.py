"""Stored answers of request ids."""

from typing import Any

from forkpoint.errors import RequestIdReusedError
from forkpoint.ids import SessionName
from forkpoint.statestore.records import RequestKey
from forkpoint.statestore.redis.access import Access
from forkpoint.statestore.redis.functions import Answer, request_arguments
from forkpoint.statestore.redis.hashes import checkpoint_of, fields_of, session_of, workflow_of
from forkpoint.statestore.rowjson import checkpoint_to_value, dump, session_to_value, workflow_to_value


async def find(access: Access, request: RequestKey, call: str | None = None) -> Answer | None:
    """The stored answer, None when there is none. RequestIdReusedError when it answered another digest or call."""
    identity, digest = request_arguments(request)
    base = access.keys.workflow(request.workflow)
    reply = await access.functions.read(base, "find_request", identity, access.functions.now_us(), digest)
    return answer_of(request, reply, call)


def answer_of(request: RequestKey, reply: Any, call: str | None) -> Answer | None:
    """What a reply of find_request says."""
    if reply[0] == b"NONE":
        return None
    if reply[0] == b"REUSED" or call not in (None, bytes(reply[1]).decode()):
        raise RequestIdReusedError(request.request_id)
    return Answer(bytes(reply[1]).decode(), reply[2], True)


async def find_text(access: Access, request: RequestKey) -> str | None:
    """Catalog.find_request."""
    answer = await find(access, request)
    return None if answer is None else dump(_as_json(request.workflow, answer))


def _as_json(workflow: str, answer: Answer) -> Any:
    """The same JSON that other backends keep."""
    value = answer.value
    match answer.call:
        case "append":
            return [int(value[0]), int(value[1]), bytes(value[2]).hex(), int(value[3])]
        case "begin_generation":
            return [bytes(value[5]).decode(), int(value[1]), bytes(value[2]).hex(), int(value[3])]
        case "create_workflow":
            return workflow_to_value(workflow_of(workflow, fields_of(value)))
        case "put_checkpoint" | "delete_checkpoint":
            return checkpoint_to_value(checkpoint_of(workflow, value))
        case "fork":
            children = [_session(workflow, bytes(child).decode(), flat) for child, flat in value[1]]
            return {"position": int(value[0]), "children": children}
    return _session(workflow, bytes(value[0]).decode(), value[1])


def _session(workflow: str, session: str, flat: list[bytes]) -> Any:
    return session_to_value(session_of(SessionName(workflow, session), fields_of(flat)).row)
