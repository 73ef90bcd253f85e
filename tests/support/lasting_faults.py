"""A catalog that fails until it is healed, or that acts and loses its answers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

from forkpoint.errors import StoreFullError, StoreUnavailableError
from forkpoint.statestore.base import Catalog

WRITES = ("commit_step", "append", "begin_generation", "put_checkpoint", "acquire", "release", "fork", "rewind")


class LastingFaults:
    """Stands for a catalog. `before`: method and the error of every call, which then has no effect; `lost`: method and
    how many calls take effect and lose their answer; `gates`: method and what its calls wait for first, while they are
    in `waiting`. `watch` is told of each call, before it (False) and after its effect (True), and may keep it."""

    def __init__(self, inner: Catalog) -> None:
        self._inner = inner
        self.before: dict[str, Exception] = {}
        self.lost: dict[str, int] = {}
        self.gates: dict[str, asyncio.Event] = {}
        self.waiting: set[str] = set()
        self.watch: Callable[[str, bool], Awaitable[None]] | None = None

    @property
    def port(self) -> Catalog:
        """The same, typed as what it stands for."""
        return cast(Catalog, self)

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._inner, name)
        if not callable(target):
            return target

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self.watch is not None:
                await self.watch(name, False)
            if name in self.gates:
                self.waiting.add(name)
                await self.gates[name].wait()
            if name in self.before:
                raise self.before[name]
            result = await cast(Callable[..., Awaitable[Any]], target)(*args, **kwargs)
            if self.watch is not None:
                await self.watch(name, True)
            if self.lost.get(name, 0) > 0:
                self.lost[name] -= 1
                raise StoreUnavailableError("catalog", "the answer was lost")
            return result

        return call

    def fill(self) -> None:
        """The disk is full: nothing can be written."""
        for name in WRITES:
            self.before[name] = StoreFullError("catalog", "no space left on device")

    def heal(self) -> None:
        """All is well again."""
        self.before.clear()
