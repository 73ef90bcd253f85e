"""Workflows."""

import pytest

from forkpoint.errors import AlreadyExistsError, EtagMismatchError, NotFoundError, PreconditionError
from forkpoint.statestore.base import Catalog
from forkpoint.statestore.records import WorkflowRow
from tests.support.store import name, new, owned, request


async def test_a_workflow_comes_back_with_its_labels(catalog: Catalog) -> None:
    made = await catalog.create_workflow(WorkflowRow("w", {"team": "ä"}))
    assert made == await catalog.get_workflow("w")
    assert (made.labels, made.revision, made.delete_us) == ({"team": "ä"}, 1, None)
    assert made.create_us > 0


async def test_rows_are_values_that_change_nothing(catalog: Catalog) -> None:
    labels = {"a": "b"}
    made = await catalog.create_workflow(WorkflowRow("w", labels))
    labels["a"] = made.labels["a"] = "changed"
    assert (await catalog.get_workflow("w")).labels == {"a": "b"}
    row, _ = await catalog.create_session(new("s", labels=labels))
    labels["a"] = row.labels["a"] = "again"
    assert (await catalog.get_session(name("s"))).labels == {"a": "changed"}


async def test_a_workflow_id_is_taken_once(catalog: Catalog) -> None:
    await catalog.create_workflow(WorkflowRow("w"), request("r1"))
    with pytest.raises(AlreadyExistsError):
        await catalog.create_workflow(WorkflowRow("w"), request("r2"))


async def test_creating_again_under_the_same_request_id_gives_the_first_answer(catalog: Catalog) -> None:
    first = await catalog.create_workflow(WorkflowRow("w", {"a": "1"}), request("r1"))
    await catalog.update_workflow("w", {"a": "2"}, None)
    assert await catalog.create_workflow(WorkflowRow("w", {"a": "1"}), request("r1")) == first


async def test_workflows_are_listed_in_pages_ascending(catalog: Catalog) -> None:
    for workflow in ("c", "a", "b", "d"):
        await catalog.create_workflow(WorkflowRow(workflow))
    await catalog.delete_workflow("b")
    first = await catalog.list_workflows("", 2)
    second = await catalog.list_workflows(first[-1].workflow, 2)
    assert [row.workflow for row in first + second] == ["a", "c", "d"]


async def test_an_update_needs_the_current_revision_when_one_is_given(catalog: Catalog) -> None:
    await catalog.create_workflow(WorkflowRow("w"))
    assert (await catalog.update_workflow("w", {"x": "1"}, 1)).revision == 2
    with pytest.raises(EtagMismatchError) as raised:
        await catalog.update_workflow("w", {"x": "2"}, 1)
    assert raised.value.etag == "2"
    row = await catalog.update_workflow("w", {"x": "3"}, None)
    assert (row.labels, row.standbys) == ({"x": "3"}, 0)
    with pytest.raises(NotFoundError):
        await catalog.update_workflow("nope", {}, None)


async def test_an_update_of_a_workflow_changes_what_is_given(catalog: Catalog) -> None:
    made = await catalog.create_workflow(WorkflowRow("w", {"x": "1"}, standbys=2))
    assert (made.standbys, made.labels) == (2, {"x": "1"})
    row = await catalog.update_workflow("w", None, 1, standbys=1)
    assert (row.standbys, row.labels, row.revision) == (1, {"x": "1"}, 2)
    row = await catalog.update_workflow("w", {}, None)
    assert (row.standbys, row.labels, row.revision) == (1, {}, 3)
    row = await catalog.update_workflow("w", None, None, standbys=0)
    assert (row.standbys, row.labels) == (0, {})
    assert await catalog.list_workflows("", 9) == [row]


async def test_a_workflow_with_sessions_is_not_deleted(catalog: Catalog) -> None:
    await owned(catalog, "s")
    with pytest.raises(PreconditionError):
        await catalog.delete_workflow("w")
    await catalog.delete_session(name("s"), 1)
    await catalog.delete_workflow("w")
    with pytest.raises(NotFoundError):
        await catalog.get_workflow("w")
    with pytest.raises(NotFoundError):
        await catalog.delete_workflow("w")
    with pytest.raises(NotFoundError):
        await catalog.create_session(new("t"))
    with pytest.raises(NotFoundError):
        await catalog.undelete_session(name("s"))
