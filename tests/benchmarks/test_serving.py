"""The serving benchmark runs on a CPU with a tiny folder, and its floors count what a model holds."""

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.serving.__main__ import measure
from benchmarks.serving.disk import cached_share, forget, read_seconds, weight_files
from benchmarks.serving.floor import StepFloor, counted_routes
from benchmarks.serving.rates import Plan
from benchmarks.serving.table import PAGE, filled
from forkpoint.model.geometry_sizes import GeometrySizes, sized_config
from forkpoint.model.loading import LoadedModel, load_model
from forkpoint.model.random_folder import RandomFolder
from forkpoint.server.engine.batch import Work
from forkpoint.server.engine.open import engine_of
from tests.support.held import held_tensors

TINY = GeometrySizes(layers=4, hidden=64, heads=1, ffn=32, experts=20, vocab=272)


@pytest.fixture(scope="module", params=["kimi-linear", "k3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place: Path = tmp_path_factory.mktemp("serving") / request.param
    RandomFolder(sized_config(request.param, TINY), shard_bytes=1 << 20).write(place)
    return place


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(folder)


def test_every_case_has_a_figure_and_what_bounds_it(folder: Path) -> None:
    plan = Plan(contexts=(16, 32), batches=(1, 3), chunks=(16,), steps=2, runs=1, warm=2)
    rows = list(measure(folder, torch.device("cpu"), plan))
    found = [(row.case.split(", ", 1)[-1], row.metric) for row in rows[3:]]
    expected = []
    for context in (16, 32):
        expected.append((f"prompt of {context} in chunks of 16", "prefill"))
        for batch in (1, 3):
            case = f"{batch} sequences of {context}"
            expected += [(case, metric) for metric in ("decode", "decode step", "experts read, a layer")]
    assert found == expected
    assert {row.metric for row in rows[:3]} == {"copy, read and written", "load"}
    assert all(row.value > 0 for row in rows)
    assert all(row.floor is not None and row.floor > 0 for row in rows[1:] if not row.metric.startswith("experts"))


def test_the_parts_of_a_step_are_all_that_the_model_holds(model: LoadedModel) -> None:
    floor = StepFloor(model)
    experts = floor.moe_layers * 20
    embedding = floor.head
    kept = sum(tensor.nbytes for tensor in held_tensors(model.decoder))
    assert floor.common + floor.head + embedding + experts * floor.expert == kept


def test_a_longer_session_a_larger_batch_and_more_experts_cost_what_they_hold(model: LoadedModel) -> None:
    floor, layout = StepFloor(model), model.layout
    one = floor.decode(1, 64, 10)
    assert floor.decode(1, 65, 10) - one == layout.latent_bytes_per_token()
    assert floor.decode(1, 64, 11) - one == floor.expert
    state = floor.decode(2, 64, 10) - one
    spec = layout.slot_tensors
    assert state > spec["S"].nbytes + 64 * layout.latent_bytes_per_token()
    assert state < layout.slot_bytes() + 64 * layout.latent_bytes_per_token() + spec["S"].nbytes // 16
    chunks = floor.prefill(64, 16, 0) - floor.prefill(64, 32, 0)
    assert chunks == 2 * (floor.common + 2 * spec["S"].nbytes) + (16 + 48) * layout.latent_bytes_per_token()


def test_routes_are_counted_once_an_expert_and_layer_and_only_while_asked(model: LoadedModel) -> None:
    engine = engine_of(model, "cpu", slots=2, pages=2)
    first, second = engine.create(), engine.create()
    per_token = model.config.moe.per_token if model.config.moe else 0
    with counted_routes(model) as one:
        engine.step([Work(first, 0, (5,))])
    assert one.experts == 3 * per_token
    with counted_routes(model) as same:
        engine.step([Work(first, 1, (7,)), Work(second, 0, (7,))])
    assert 3 * per_token <= same.experts <= min(2 * per_token, 20) * 3
    engine.step([Work(first, 2, (9,))])
    assert one.experts == 3 * per_token


@pytest.mark.parametrize(
    ("plan", "problem"),
    [
        (Plan((24,), (1,), (16,), 1, 1), "a context of 24"),
        (Plan((16, 80), (1,), (16,), 4, 1), "a context of 80"),
        (Plan((16,), (1,), (0,), 1, 1), "0 is not positive"),
        (Plan((16, 80), (1,), (16,), 3, 1), None),
    ],
)
def test_a_plan_that_can_not_be_run_says_why(plan: Plan, problem: str | None) -> None:
    found = plan.problem(100)
    assert found is None if problem is None else found is not None and problem in found


def test_files_are_read_whole_and_may_be_forgotten(folder: Path, tmp_path: Path) -> None:
    for path in weight_files(folder):
        shutil.copy(path, tmp_path)
    files = weight_files(tmp_path)
    assert len(files) > 1 and read_seconds(files) > 0
    assert cached_share(files) in (1.0, None)
    forget(files)
    # A file system in memory forgets nothing.
    assert cached_share(files) in (0.0, 1.0, None)


def test_the_page_in_the_repository_is_that_of_its_result_file() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert filled(page) == page
