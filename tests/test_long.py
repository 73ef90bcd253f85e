"""The list of long tests names tests that there are."""

import re
from pathlib import Path

import pytest

from tests.long import LONG, is_long

HERE = Path(__file__).parent
TESTED = re.compile(r"^\|[^|]+\|\s*tested\s*\|(?P<tests>[^|]+)\|", re.MULTILINE)
NAMED = re.compile(r"`tests/(?P<place>[\w/.-]+::\w+)`")


@pytest.mark.parametrize("pattern", LONG)
def test_a_long_test_is_there(pattern: str) -> None:
    path, _, test = pattern.partition("::")
    name = test.partition("[")[0].removesuffix("*")
    assert f"def {name}(" in (HERE / path).read_text(encoding="utf-8")


def test_a_pattern_may_mean_some_of_a_tests_parameters() -> None:
    durable = "statestore/test_redis_durability.py::test_every_acknowledged_write_is_on_a_replica"
    assert is_long(f"{durable}[redis-wait=1]") and is_long(f"{durable}[valkey-waitaof=1]")
    assert not is_long(f"{durable}[valkey-wait=1]") and not is_long(durable)


def test_a_long_test_is_marked(request: pytest.FixtureRequest) -> None:
    assert [item.name for item in request.session.items if item.get_closest_marker("long")] == [
        item.name
        for item in request.session.items
        if item.path.is_relative_to(HERE) and is_long(f"{item.path.relative_to(HERE).as_posix()}::{item.name}")
    ]


def test_a_promise_of_the_readme_has_a_test_that_is_not_long() -> None:
    rows = TESTED.findall((HERE.parent / "README.md").read_text(encoding="utf-8"))
    assert len(rows) > 20
    assert [row for row in rows if all(is_long(place) for place in NAMED.findall(row))] == []
