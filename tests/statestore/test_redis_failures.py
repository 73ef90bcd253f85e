"""What Redis says, and which of our errors it is."""

import pytest
from redis.exceptions import (
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from forkpoint.errors import StoreFullError, StoreUnavailableError
from forkpoint.statestore.redis.connection import Confirmation
from forkpoint.statestore.redis.failures import failure, failures, function_is_missing

FULL_DISK = "MISCONF Errors writing to the AOF file: No space left on device"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), StoreFullError),
        (ResponseError("OOM allow-oom flag is not set on the script, can not run it"), StoreFullError),
        (ResponseError(FULL_DISK), StoreFullError),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots, but it's unable to"), StoreUnavailableError),
        (ResponseError("NOREPLICAS Not enough good replicas to write."), StoreUnavailableError),
        (BusyLoadingError("Redis is loading the dataset in memory"), StoreUnavailableError),
        (ReadOnlyError("You can't write against a read only replica."), StoreUnavailableError),
        (MasterDownError("Link with MASTER is down"), StoreUnavailableError),
        (ClusterDownError("The cluster is down"), StoreUnavailableError),
        (RedisConnectionError("Connection closed by server."), StoreUnavailableError),
        (RedisTimeoutError("Timeout connecting to server"), StoreUnavailableError),
        (TimeoutError(), StoreUnavailableError),
        (ConnectionResetError(104, "reset by peer"), StoreUnavailableError),
    ],
)
def test_every_failure_has_a_meaning(error: Exception, kind: type[Exception]) -> None:
    assert type(failure("redis://h", error)) is kind
    assert "redis://h" in str(failure("redis://h", error))
    with pytest.raises(kind) as raised, failures("redis://h"):
        raise error
    assert raised.value.__cause__ is error


def test_our_own_errors_and_faults_of_the_program_pass() -> None:
    ours = StoreUnavailableError("redis://h", "why")
    assert failure("other", ours) is ours
    with pytest.raises(KeyError), failures("redis://h"):
        raise KeyError("a mistake")


def test_a_missing_function_is_told_from_a_failing_one() -> None:
    assert function_is_missing(ResponseError("Function not found"))
    assert not function_is_missing(ResponseError("user_function:1: attempt to index a nil value"))
    assert not function_is_missing(b"Function not found")


@pytest.mark.parametrize(
    ("command", "reply", "problem"),
    [
        (("WAIT", 2, 10), 2, None),
        (("WAIT", 2, 10), 1, "1 of 2 replicas have it"),
        (("WAITAOF", 1, 1, 10), [1, 1], None),
        (("WAITAOF", 1, 1, 10), [1, 0], "0 of 1 replicas have it on disk"),
        (("WAITAOF", 1, 1, 10), [0, 1], "the primary has not synced it"),
        (("WAITAOF", 1, 1, 10), ResponseError("WAITAOF cannot be used"), "WAITAOF cannot be used"),
    ],
)
def test_a_confirmation_counts_what_was_asked_for(
    command: tuple[str | int, ...], reply: object, problem: str | None
) -> None:
    assert Confirmation(command, 0.01).problem(reply) == problem
