"""This process among the store's nodes: its lock, its row and its lease."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from forkpoint.errors import ForkpointError, NotFoundError, StoreUnavailableError, UnavailableError
from forkpoint.server.session.core import NodeCore
from forkpoint.server.session.lease import IncarnationLock, LeaseKeeper
from forkpoint.server.session.membership import Membership
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.records import NodeRow, NodeStatus, StoreMarker

log = logging.getLogger(__name__)

PROBE_SECONDS: Final = 0.5
"""How long the lease's thread waits for the node's own connection to show that it works."""
RENEW_TIMEOUT_SECONDS: Final = 10.0
"""A renewal that takes longer has failed; the next one is tried."""


class Renewal:
    """What is done for the lease again and again: the node's counter moves on, and its status is told with it.

    A node whose work does not get on tells so once; then its lease ends, so that others take its sessions. When it gets
    on again it is a node like any that was taken for dead.
    """

    def __init__(self, row: NodeRow, status: Callable[[], NodeStatus], taken_for_dead: Callable[[], None]) -> None:
        """`taken_for_dead` is called once the node is registered anew."""
        self.row = row
        self._status = status
        self._taken_for_dead = taken_for_dead
        self._told_stall = False

    async def renew(self, catalog: Catalog) -> None:
        """Renew. A node that others took for dead (it was stopped for a while) is not known any more: it registers
        again. What it owned may be its own no longer; epochs see to that."""
        status = self._status()
        if status.stalled and self._told_stall:
            return
        try:
            await catalog.renew_lease(self.row.incarnation, status)
        except NotFoundError:
            log.warning("other nodes took this one for dead: it registers again")
            await catalog.register_node(replace(self.row, status=status))
            self._taken_for_dead()
        if status.stalled:
            log.error("the node's work does not get on: its lease ends")
        self._told_stall = status.stalled


class OwnCatalog:
    """A second catalog on the same store, used by one thread with a loop of its own.

    `probe` raises StoreUnavailableError when the node's own connection is of no use: then the lease must end, so that
    others take the sessions. A catalog that fails is closed, and made anew for the next renewal.
    """

    def __init__(
        self,
        make: Callable[[], Catalog],
        marker: StoreMarker,
        renew: Callable[[Catalog], Awaitable[None]],
        probe: Callable[[], None] = lambda: None,
    ) -> None:
        self._probe = probe
        self._make = make
        self._marker = marker
        self._do = renew
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
            await self._do(self._catalog)
        except StoreUnavailableError:
            await self._drop()
            raise

    async def _drop(self) -> None:
        catalog, self._catalog = self._catalog, None
        if catalog is not None:
            await catalog.close()


class Presence:
    """Registers the incarnation and keeps it alive."""

    def __init__(self, core: NodeCore, members: Membership, lease_catalog: Callable[[], Catalog] | None) -> None:
        self._core = core
        self._members = members
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
        await core.engine.capacity()
        await core.catalog.register_node(replace(node, status=self._members.status()))
        loop = asyncio.get_running_loop()

        def taken_for_dead() -> None:
            loop.call_soon_threadsafe(core.doubt_all)

        self._keeper = self.make_keeper(Renewal(node, self._members.status, taken_for_dead))
        self._keeper.start()
        await self._members.refresh()

    def make_keeper(self, renewal: Renewal) -> LeaseKeeper:
        """Renews the lease from a thread of its own; a simulation, which has no threads, makes another."""
        renew, close = self._in_thread(renewal)
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

    def _in_thread(self, renewal: Renewal) -> tuple[Callable[[], object], Callable[[], None]]:
        """What the lease's thread calls to renew, and in the end."""
        loop = asyncio.get_running_loop()

        def probe() -> None:
            look = asyncio.run_coroutine_threadsafe(self._core.catalog.list_nodes(), loop)
            try:
                look.result(PROBE_SECONDS)
            except TimeoutError:
                look.cancel()  # slow is not broken

        if self._make is not None:
            own = OwnCatalog(self._make, self._core.marker, renewal.renew, probe)
            return own.renew, own.close

        def renew() -> object:
            if loop.is_closed():
                raise UnavailableError("the node's loop has ended")
            work = renewal.renew(self._core.catalog)
            return asyncio.run_coroutine_threadsafe(work, loop).result(RENEW_TIMEOUT_SECONDS)

        return renew, lambda: None
