"""A store belongs to one model; incarnations hold leases."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from forkpoint.errors import AlreadyExistsError, NotFoundError, StateIncompatibleError, StoreUnavailableError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.records import NodeRow, NodeStatus, StoreMarker
from tests.conformance.backends import Backend
from tests.conformance.conftest import OpenCatalog
from tests.support.store import MARKER, name, owned


def node(incarnation: str) -> NodeRow:
    return NodeRow(incarnation, "node-a", "127.0.0.1:1", "numerics", lock_path="/run/lock")


async def test_the_marker_is_what_the_store_was_opened_with(catalog: Catalog) -> None:
    assert catalog.marker == MARKER


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            replace(MARKER, namespace="tenant"),
            f"namespace: .* {MARKER.namespace}, .* tenant",
        ),
        (replace(MARKER, model_digest=bytes(32)), f"model digest: the store holds {MARKER.model_digest.hex()}, this"),
        (
            replace(MARKER, tokenizer_digest=bytes(32)),
            f"tokenizer digest: .* {MARKER.tokenizer_digest.hex()}, ",
        ),
        (replace(MARKER, schema_version=99), "schema version: .* 99"),
    ],
    ids=["namespace", "model", "tokenizer", "schema"],
)
async def test_a_store_made_for_another_marker_is_refused(
    backend: Backend,
    catalog: Catalog,
    another: OpenCatalog,
    unopened: Callable[[], Catalog],
    other: StoreMarker,
    message: str,
) -> None:
    await owned(catalog, "s")
    stranger = unopened()
    if backend.namespaces and other.namespace != MARKER.namespace:
        await stranger.open(other)
        assert await stranger.list_workflows("", 10) == []
    else:
        with pytest.raises(StateIncompatibleError, match=message):
            await stranger.open(other)
    again = await another()
    assert (await again.get_session(name("s"))).epoch == 1


async def test_calls_before_open_and_after_close_are_unavailable(unopened: Callable[[], Catalog]) -> None:
    catalog = unopened()
    with pytest.raises(StoreUnavailableError):
        await catalog.list_nodes()
    with pytest.raises(StoreUnavailableError):
        _ = catalog.marker
    await catalog.open(MARKER)
    await catalog.close()
    await catalog.close()
    with pytest.raises(StoreUnavailableError):
        await catalog.list_nodes()


async def test_a_registered_incarnation_starts_at_counter_one_and_counts_up(catalog: Catalog) -> None:
    await catalog.register_node(node("i1"))
    await catalog.register_node(node("i2"))
    assert [await catalog.renew_lease("i1") for _ in range(3)] == [2, 3, 4]
    assert [(row.incarnation, row.counter) for row in await catalog.list_nodes()] == [("i1", 4), ("i2", 1)]
    assert (await catalog.list_nodes())[1] == replace(node("i2"), counter=1)


async def test_a_node_tells_its_status_with_its_lease_and_others_keep_the_last(catalog: Catalog) -> None:
    status = NodeStatus(True, False, 8, 3, 400, 7, sessions=5, waiting=2, following=1)
    await catalog.register_node(replace(node("i1"), status=NodeStatus(slots_total=8)))
    await catalog.register_node(node("i2"))
    assert [row.status for row in await catalog.list_nodes()] == [NodeStatus(slots_total=8), NodeStatus()]
    assert await catalog.renew_lease("i1", status) == 2
    assert await catalog.renew_lease("i1") == 3
    assert [(row.counter, row.status) for row in await catalog.list_nodes()] == [(3, status), (1, NodeStatus())]
    await catalog.renew_lease("i1", NodeStatus())
    assert (await catalog.list_nodes())[0].status == NodeStatus()
    with pytest.raises(NotFoundError):
        await catalog.renew_lease("i3", status)


async def test_an_incarnation_is_registered_once(catalog: Catalog) -> None:
    await catalog.register_node(node("i1"))
    with pytest.raises(AlreadyExistsError):
        await catalog.register_node(node("i1"))


async def test_a_removed_incarnation_cannot_renew(catalog: Catalog) -> None:
    await catalog.register_node(node("i1"))
    await catalog.remove_node("i1")
    await catalog.remove_node("i1")
    assert await catalog.list_nodes() == []
    with pytest.raises(NotFoundError):
        await catalog.renew_lease("i1")
