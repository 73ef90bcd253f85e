"""A signal that many may wait for."""

import asyncio


class Signal:
    """`fire` wakes all who wait at that moment. Check the condition, then wait, with no await between."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def fire(self) -> None:
        """Wake everyone who waits now."""
        fired, self._event = self._event, asyncio.Event()
        fired.set()

    async def wait(self) -> None:
        """Until the next fire."""
        await self._event.wait()
