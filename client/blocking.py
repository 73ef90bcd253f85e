"""Blocking twins of asynchronous methods: the same parameters and documentation, the result instead of an awaitable."""

from __future__ import annotations  # Events is a name of both twins

import functools
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from forkpoint.client import events
from forkpoint.client.background import Hold

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M")


class Twin(Generic[T]):
    """A blocking object over an asynchronous one."""

    def __init__(self, hold: Hold, inner: T) -> None:
        self._hold = hold
        self._inner = inner


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """The twin of a coroutine method."""

    @functools.wraps(method)
    def call(self: Twin[Any], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._hold.run(method(self._inner, *args, **kwargs))

    return call


def iterating(method: Callable[Concatenate[Any, P], AsyncIterator[R]]) -> Callable[Concatenate[Any, P], Iterator[R]]:
    """The twin of an asynchronous generator's method."""

    @functools.wraps(method)
    def call(self: Twin[Any], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[R]:
        return Items(self._hold, method(self._inner, *args, **kwargs))

    return call


def telling(method: Callable[Concatenate[Any, P], events.Events[M]]) -> Callable[Concatenate[Any, P], Events[M]]:
    """The twin of a method that answers with Events."""

    @functools.wraps(method)
    def call(self: Twin[Any], /, *args: P.args, **kwargs: P.kwargs) -> Events[M]:
        return Events(self._hold, method(self._inner, *args, **kwargs))

    return call


class Items(Twin[AsyncIterator[R]], Iterator[R]):
    """Items of a stream. Several threads may share it: each item goes to one of them."""

    def __init__(self, hold: Hold, inner: AsyncIterator[R]) -> None:
        super().__init__(hold, inner)
        self._turn = threading.Lock()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        with self._turn:
            try:
                return self._hold.run(_next(self._inner))
            except StopAsyncIteration:
                raise StopIteration from None

    def __del__(self) -> None:
        close = getattr(self._inner, "aclose", None)
        if close is not None:
            self._hold.start(_closed(close))


class Events(Twin[events.Events[M]], Iterator[M]):
    """Iterate over it for events as they come, or ask for `result()`, the last one. Raises RemoteError.

    The work lasts as long as the call: `cancel`, or leaving the block of `with`, ends both.
    """

    def __init__(self, hold: Hold, inner: events.Events[M]) -> None:
        super().__init__(hold, inner)
        self._items = Items(hold, inner)

    @property
    def last(self) -> M | None:
        """The newest event, None before the first."""
        return self._inner.last

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> M:
        return next(self._items)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def result(self) -> M:
        """Read to the end; returns the last event."""
        return self._hold.run(self._inner.result())

    def cancel(self) -> None:
        """End the call, and the work with it. Idempotent."""
        self._hold.run(self._inner.cancel())


async def _next(items: AsyncIterator[R]) -> R:
    return await anext(items)


async def _closed(close: Callable[[], Coroutine[Any, Any, object]]) -> None:
    await close()
