"""A node whose acquire was answered too late: the session is another one's by then, and nothing is written to it."""

import asyncio

import pytest

from forkpoint.errors import ForkpointError
from forkpoint.ids import SessionName
from forkpoint.statestore.records import SessionRow
from tests.support.session_site import Running, Site, background


def delay_acquire(node: Running) -> tuple[asyncio.Event, asyncio.Event]:
    """Hold back the answer to the node's next acquire: (it took effect, let the answer through)."""
    done, go_on = asyncio.Event(), asyncio.Event()
    inner = node.catalog.acquire

    async def acquire(name: SessionName, incarnation: str, expected_epoch: int, request: object = None) -> SessionRow:
        row = await inner(name, incarnation, expected_epoch)
        done.set()
        await go_on.wait()
        return row

    node.faults.acquire = acquire  # type: ignore[attr-defined]
    return done, go_on


async def test_an_acquire_that_is_answered_after_another_node_took_the_session_writes_nothing(site: Site) -> None:
    first, second = await site.node(), await site.node()
    await first.workflow()
    name = await first.session("s")
    done, go_on = delay_acquire(first)
    appending = background(first.append(name, b"too late"))
    await done.wait()
    late = await first.catalog.get_session(name)
    taker = next(node for node in await second.catalog.list_nodes() if node.incarnation != late.owner)
    await second.catalog.acquire(name, taker.incarnation, late.epoch)
    go_on.set()
    with pytest.raises(ForkpointError):
        await appending
    row = await second.catalog.get_session(name)
    assert (row.head, row.epoch, row.owner) == (0, late.epoch + 1, taker.incarnation)
