"""Short names on the command line: `w` is a workflow, `w/s` a session, `w/s/c` a checkpoint. Full names work too."""

from forkpoint.errors import InvalidFieldError
from forkpoint.ids import SessionName, check_id, parse_workflow


def workflow_name(text: str) -> str:
    """`w` or `workflows/w` -> `workflows/w`; raises InvalidFieldError."""
    return f"workflows/{parse_workflow(text if '/' in text else f'workflows/{text}', 'workflow')}"


def session_name(text: str) -> str:
    """`w/s` or the full name -> the full name; raises InvalidFieldError."""
    parts = text.split("/")
    if len(parts) == 2 and parts[0] != "workflows":
        return str(SessionName(check_id(parts[0], "workflow"), check_id(parts[1], "session")))
    if len(parts) == 4:
        return str(SessionName.parse(text, "session"))
    raise InvalidFieldError("session", f"{text!r} is no session: write W/S or workflows/W/sessions/S")


def checkpoint_name(text: str) -> str:
    """`w/s/c` or the full name -> the full name; raises InvalidFieldError."""
    parts = text.split("/")
    if len(parts) == 3:
        return f"{session_name('/'.join(parts[:2]))}/checkpoints/{check_id(parts[2], 'checkpoint')}"
    if len(parts) == 6 and parts[4] == "checkpoints":
        return f"{session_name('/'.join(parts[:4]))}/checkpoints/{check_id(parts[5], 'checkpoint')}"
    raise InvalidFieldError(
        "checkpoint", f"{text!r} is no checkpoint: write W/S/C or workflows/W/sessions/S/checkpoints/C"
    )


def short(name: str) -> str:
    """The short form of a full name, for tables; other text stays."""
    parts = name.split("/")
    return "/".join(parts[1::2]) if parts[0] == "workflows" and len(parts) % 2 == 0 else name


def split_session(text: str) -> tuple[str, str]:
    """(workflow's full name, session id) of a session's name."""
    name = SessionName.parse(session_name(text))
    return f"workflows/{name.workflow}", name.session
