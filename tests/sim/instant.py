"""Coroutines of the in-memory store wait for nothing, so they can be run on the spot."""

from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    raise AssertionError("the in-memory store waited inside a call")


def all_at_once(items: AsyncIterator[T]) -> list[T]:
    """The items of an iterator that waits for nothing."""

    async def collect() -> list[T]:
        return [item async for item in items]

    return at_once(collect())
