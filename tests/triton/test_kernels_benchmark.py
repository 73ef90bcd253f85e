"""The benchmark of the kernels runs through on tiny shapes: a run on a GPU must not be lost to a typo."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.kernels import __main__ as main
from benchmarks.kernels.run import Case, Mode, Run, Times, copies, timed
from benchmarks.record import Measurement
from tests.support.triton_shim import DEVICE

FACTS = ("no machine", "no commit")
RUN = Run(Mode.DRY, DEVICE)
# Lanes that a mask drops may hold anything, which numpy remarks on in the interpreter.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


@pytest.mark.parametrize("part", main.PARTS)
def test_every_case_of_a_part_runs_and_finds_equal_bits(part: str) -> None:
    found = main.measure(RUN, [part], math.inf, None, FACTS)
    assert [row for row in found if row.unit == "equal" and row.value != 1.0] == []
    assert any(row.unit in ("us", "ms") and row.floor for row in found)


def test_a_case_that_raises_leaves_a_line_and_the_rest_go_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken() -> Iterator[Measurement]:
        yield Measurement("first", "came through", "equal", 1.0)
        raise RuntimeError("out of memory")

    def cases_of(part: str, run: Run) -> list[Case]:
        if part == "mla":
            raise ImportError("no such kernel")
        return [("broken", broken), ("sound", lambda: iter([Measurement("last", "time", "us", 3.0)]))]

    monkeypatch.setattr(main, "cases_of", cases_of)
    found = main.measure(RUN, ["mla", "norms"], math.inf, tmp_path, FACTS)
    metrics = ["failed: ImportError", "came through", "failed: RuntimeError", "time"]
    assert [row.metric for row in found] == metrics
    lines = (tmp_path / "kernels.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["metric"] for line in lines] == metrics
    assert {json.loads(line)["machine"] for line in lines} == {"no machine"}


def test_no_case_begins_after_its_time() -> None:
    assert main.measure(RUN, ["norms"], -math.inf, None, FACTS) == []


def test_a_contender_that_fails_is_left_out_and_ours_must_not() -> None:
    def fails() -> object:
        raise ImportError("not installed")

    assert set(RUN.compare({"ours": [lambda: None], "peer": [fails]})) == {"ours"}
    with pytest.raises(ImportError):
        RUN.compare({"ours": [fails]})


def test_times_are_medians_with_the_bounds_of_the_middle_four_fifths() -> None:
    assert Times.of([float(n) for n in range(20, 0, -1)]) == Times(p50=10.5, p10=3.0, p90=18.0)
    assert copies(1.0) == 64
    assert copies(1e9) == 1


def test_a_row_in_milliseconds_scales_everything_and_says_whether_it_meets_its_target() -> None:
    row = timed("case", "time", Times(2000.0, 1900.0, 2100.0), ("peer", Times(4000.0, 1.0, 1.0)), 1000.0, 1500.0, "ms")
    assert (row.value, row.peer_value, row.floor, row.target, row.p10, row.p90) == (2.0, 4.0, 1.0, 1.5, 1.9, 2.1)
    assert "peer 4 (2.00x)" in main.line(row)
    assert "floor 1 (50%)" in main.line(row)
    assert "MISSES 1.5" in main.line(row)
    assert "meets 1" in main.line(Measurement("case", "bits", "equal", 1.0, target=1.0))
    assert "MISSES 1" in main.line(Measurement("case", "bits", "equal", 0.0, target=1.0))


def test_the_operands_of_a_gpu_run_are_on_the_device_it_names() -> None:
    assert RUN.random(2, 3).device.type == torch.device(DEVICE).type
