"""This process among the store's nodes: its lock, its row and its lease."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from forkpoint.errors import ForkpointError, NotFoundError, StoreUnavailableError, UnavailableError
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.lease import IncarnationLock, LeaseKeeper
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.records import NodeRow, StoreMarker

log = logging.getLogger(__name__)

PROBE_SECONDS: Final = 0.5
"""How long the lease's thread waits for the node's own connection to show that it works."""
RENEW_TIMEOUT_SECONDS: Final = 10.0
"""A renewal that takes longer has failed; the next one is tried."""


class OwnCatalog:
    """A second catalog on the same store, used by one thread with a loop of its own.

    `probe` raises StoreUnavailableError when the node's own connection is of no use: then the lease must end, so that
    others take the sessions. A catalog that fails is closed, and made anew for the next renewal.
    """

    def __init__(
        self, make: Callable[[], Catalog], marker: StoreMarker, row: NodeRow, probe: Callable[[], None] = lambda: None
    ) -> None:
        self._probe = probe
        self._make = make
        self._marker = marker
        self._row = row
        self._loop: asyncio.AbstractEventLoop | None = None
        self._catalog: Catalog | None = None

    def renew(self) -> None:
        """Renew once, in the calling thread, which is always the same."""
        self._probe()
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        self._loop.run_until_complete(self._renew())

    def close(self) -> None:
        """Close catalog and loop, in the same thread."""
        if self._loop is None:
            return
        self._loop.run_until_complete(self._drop())
        self._loop.close()

    async def _renew(self) -> None:
        if self._catalog is None:
            self._catalog = self._make()
            try:
                await self._catalog.open(self._marker)
            except BaseException:
                await self._drop()
                raise
        try:
            await renew_or_register(self._catalog, self._row)
        except StoreUnavailableError:
            await self._drop()
            raise

    async def _drop(self) -> None:
        catalog, self._catalog = self._catalog, None
        if catalog is not None:
            await catalog.close()


async def renew_or_register(catalog: Catalog, row: NodeRow) -> None:
    """Renew. A node that others took for dead (it was stopped for a while) is not known any more: it registers again.
    What it owned is not its own any longer; epochs see to that."""
    try:
        await catalog.renew_lease(row.incarnation)
    except NotFoundError:
        log.warning("other nodes took this one for dead: it registers again")
        await catalog.register_node(row)


class Presence:
    """Registers the incarnation and keeps it alive."""

    def __init__(self, core: NodeCore, lease_catalog: Callable[[], Catalog] | None) -> None:
        self._core = core
        self._make = lease_catalog
        self._lock: IncarnationLock | None = None
        self._keeper: LeaseKeeper | None = None

    async def begin(self) -> None:
        """Lock first, then the row that names the lock, then the lease."""
        core, options = self._core, self._core.options
        lock_path = ""
        if options.lock_folder is not None:
            self._lock = IncarnationLock.acquire(options.lock_folder.absolute() / f"{core.incarnation}.lock")
            lock_path = str(self._lock.path)
        numerics = core.engine.facts.numerics_id
        node = NodeRow(core.incarnation, options.node, options.address, numerics, lock_path=lock_path)
        await core.catalog.register_node(node)
        self._keeper = self.make_keeper(node)
        self._keeper.start()

    def make_keeper(self, row: NodeRow) -> LeaseKeeper:
        """Renews the lease of `row` from a thread of its own; a simulation, which has no threads, makes another."""
        renew, close = self._renewal(row)
        return LeaseKeeper(renew, self._core.options.lease_renew_seconds, close)

    async def end(self) -> None:
        """The incarnation ended well: row and lock file go."""
        await self._stop_keeper()
        try:
            await self._core.catalog.remove_node(self._core.incarnation)
        except ForkpointError as error:
            log.warning("the node's row was not removed: %s", error)
            self.drop_lock(unlink=False)
        else:
            self.drop_lock(unlink=True)

    async def vanish(self) -> None:
        """As a killed process: the lock is free, the row stays."""
        await self._stop_keeper()
        self.drop_lock(unlink=False)

    def drop_lock(self, unlink: bool) -> None:
        """Let the lock go."""
        if self._lock is not None:
            self._lock.release(unlink)

    async def _stop_keeper(self) -> None:
        if self._keeper is not None:
            self._keeper.stop()
            await self._keeper.join()

    def _renewal(self, row: NodeRow) -> tuple[Callable[[], object], Callable[[], None]]:
        loop = asyncio.get_running_loop()

        def probe() -> None:
            look = asyncio.run_coroutine_threadsafe(self._core.catalog.list_nodes(), loop)
            try:
                look.result(PROBE_SECONDS)
            except TimeoutError:
                look.cancel()  # slow is not broken

        if self._make is not None:
            own = OwnCatalog(self._make, self._core.marker, row, probe)
            return own.renew, own.close

        def renew() -> object:
            if loop.is_closed():
                raise UnavailableError("the node's loop has ended")
            renewal = renew_or_register(self._core.catalog, row)
            return asyncio.run_coroutine_threadsafe(renewal, loop).result(RENEW_TIMEOUT_SECONDS)

        return renew, lambda: None
