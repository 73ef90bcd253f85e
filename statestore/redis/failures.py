"""What a failure of Redis means in our words."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from forkpoint.errors import ForkpointError, StoreFullError, StoreUnavailableError

FULL: Final = ("No space left on device", "Disk quota exceeded", "write error: Disk full")
"""What a server that can't write its files says in a MISCONF error."""


def failure(store: str, error: BaseException) -> ForkpointError:
    """StoreFullError when memory or a disk is full, else StoreUnavailableError. `store` names the store in it.

    LOADING, READONLY, MASTERDOWN, CLUSTERDOWN, NOREPLICAS and MISCONF pass by themselves or when an operator acts; so
    may anything else that a server says, such as a password that is refused while it is being changed.
    """
    if isinstance(error, ForkpointError):
        return error
    text = str(error) or type(error).__name__
    if isinstance(error, OutOfMemoryError) or text.startswith("OOM "):
        return StoreFullError(store, f"maxmemory is reached: {text}")
    if isinstance(error, ResponseError) and any(word in text for word in FULL):
        return StoreFullError(store, text)
    if isinstance(error, TimeoutError):
        return StoreUnavailableError(store, "no answer in time; what was asked for may have happened")
    return StoreUnavailableError(store, f"{type(error).__name__}: {text}")


@contextmanager
def failures(store: str) -> Iterator[None]:
    """Turn errors of redis-py, of sockets and timeouts into ours."""
    try:
        yield
    except (RedisError, OSError, TimeoutError) as error:
        raise failure(store, error) from error


def function_is_missing(reply: object) -> bool:
    """Whether a reply says that our library is not loaded (a new server, FUNCTION FLUSH, a failover that lost it)."""
    return isinstance(reply, ResponseError) and "Function not found" in str(reply)
