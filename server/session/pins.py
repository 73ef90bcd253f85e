"""Pins: a manifest that this node reads stays in the store until it has been read."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forkpoint.errors import ForkpointError, NodeDrainingError
from forkpoint.ids import new_id
from forkpoint.server.session.tasks import TaskOwner
from forkpoint.statestore.collection import CollectionCatalog
from forkpoint.statestore.records import ManifestKey, Pin

log = logging.getLogger(__name__)


class Pins:
    """The pins of one incarnation. They are taken away in the background; one that could not be is tried again with the
    next, and those of a node that is gone are dropped by whoever collects."""

    def __init__(self, catalog: CollectionCatalog, incarnation: str, tasks: TaskOwner) -> None:
        self._catalog = catalog
        self._incarnation = incarnation
        self._tasks = tasks
        self._owed: set[str] = set()

    @asynccontextmanager
    async def hold(self, key: ManifestKey) -> AsyncIterator[None]:
        """Hold a manifest inside the block. Raises NotFoundError when it was collected."""
        pin = new_id("p")
        try:
            await self._catalog.pin(Pin(pin, self._incarnation, key))
            yield
        finally:
            self._owed.add(pin)
            try:
                self._tasks.spawn(self._pay(), f"unpin {pin}")
            except NodeDrainingError:
                log.info("pin %s is left: the node stops", pin)

    async def _pay(self) -> None:
        for pin in sorted(self._owed):
            try:
                await self._catalog.unpin(pin)
            except ForkpointError as error:
                log.warning("pin %s was not taken away: %s", pin, error)
                return
            self._owed.discard(pin)
