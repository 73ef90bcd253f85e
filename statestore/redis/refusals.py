"""Refusals of the functions as the port's errors."""

from forkpoint.errors import (
    AlreadyExistsError,
    EtagMismatchError,
    ForkpointError,
    LogCorruptError,
    NotFoundError,
    PositionBeyondHeadError,
    PreconditionError,
    SessionBusyError,
    StaleEpochError,
)
from forkpoint.ids import SessionName
from forkpoint.move_errors import MigrationEndedError, MigrationUnderwayError
from forkpoint.statestore.redis.functions import Refusal


def workflow_error(refusal: Refusal, workflow: str) -> ForkpointError:
    """Why a call on a workflow was refused."""
    name = f"workflows/{workflow}"
    match refusal.status:
        case "NO_WORKFLOW":
            return NotFoundError(name)
        case "EXISTS":
            return AlreadyExistsError(name)
        case "ETAG":
            return EtagMismatchError(name, refusal.text(0))
        case "HAS_SESSIONS":
            return PreconditionError(f"{name} still has sessions, {refusal.text(0)} among them")
    raise refusal


def session_error(refusal: Refusal, name: SessionName, epoch: int = 0) -> ForkpointError:
    """Why a call on a session was refused; `epoch` is the caller's."""
    match refusal.status:
        case "MISSING":
            return NotFoundError(str(SessionName(name.workflow, refusal.text(0))))
        case "DELETED":
            return NotFoundError(str(SessionName(name.workflow, refusal.text(0))), "is deleted")
        case "EXISTS":
            return AlreadyExistsError(str(SessionName(name.workflow, refusal.text(0))))
        case "NO_WORKFLOW":
            return NotFoundError(f"workflows/{name.workflow}")
        case "ETAG":
            return EtagMismatchError(str(name), refusal.text(0))
        case "STALE_EPOCH":
            return StaleEpochError(str(name), epoch, refusal.number(0))
        case "BUSY":
            return SessionBusyError(str(name), f"generation {refusal.text(0)}", refusal.number(1))
        case "BEYOND":
            return PositionBeyondHeadError(str(name), refusal.number(0), refusal.number(1))
        case "NOT_DELETED":
            return PreconditionError(f"{name} is not deleted")
        case "NOT_QUARANTINED":
            return PreconditionError(f"{name} is not quarantined")
        case "UNDER_WAY":
            return MigrationUnderwayError(str(name), refusal.text(0), refusal.text(1))
        case "MIGRATION_ENDED":
            return MigrationEndedError(str(name), refusal.text(0))
        case "LOG_GOES_ON":
            return log_goes_on(name, refusal.number(0))
    raise refusal


def log_goes_on(name: SessionName, head: int) -> LogCorruptError:
    """A record lies behind the head: nothing may be appended, and nothing is right."""
    return LogCorruptError(str(name), head, head, "the log goes on behind the session's head")
