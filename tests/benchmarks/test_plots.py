"""Plots are drawn from a result file, anywhere, and the same file gives the same bytes."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import plots
from benchmarks.record import Measurement, save

PREFILL = Measurement("prefill H96 T512", plots.PREFILL, "ms", 0.2, "fla chunk_kda", 0.6, 0.1, 0.19, 0.19, 0.21)
DECODE = Measurement("decode H96 batch 1 float32", plots.DECODE, "us", 9.0, "fla recurrent", 7.0, 3.0)
ROWS = [
    PREFILL,
    replace(PREFILL, peer="fla conv + chunk_kda", peer_value=0.8),
    replace(PREFILL, case="prefill H96 T8192", value=1.2, peer_value=3.0, floor=0.3),
    replace(PREFILL, case="prefill H96 T8192", metric=f"{plots.PREFILL}, called from Python", value=9.9),
    replace(PREFILL, case="prefill H96 8x1024", value=1.1),
    replace(PREFILL, case="prefill H32 T512", value=0.1, peer=None, peer_value=None),
    DECODE,
    replace(DECODE, case="decode H96 batch 64 float32", value=150.0, peer_value=258.0, floor=102.0),
    replace(DECODE, case="decode H96 batch 64 bfloat16", value=100.0, peer_value=176.0, floor=51.0),
    Measurement("decode H96 batch 64 float32", "floor of any recurrent kernel", "us", 192.0),
    Measurement("mla H96 context 32768 batch 64 x 1", "a layer", "us", 1200.0, floor=600.0),
    Measurement("linear K 64 N 32", "row alone equals its batch", "equal", 1.0),
    Measurement("linear K 64 N 32 M 16", "time", "us", 11.0, "cuBLAS", 10.0, 5.0),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save("kernels", ROWS, "a GPU", "0123abcd", tmp_path)


def test_lines_hold_the_figures_of_their_cases_in_ascending_order(source: Path) -> None:
    rows = plots.read(source)
    wide, narrow, decode = plots.kda_panels(rows)
    assert wide.lines["ours"] == [(512, 0.2), (8192, 1.2)]
    assert wide.lines["fla"] == [(512, 0.6), (8192, 3.0)]
    assert wide.lines["fla with its conv"] == [(512, 0.8)]
    assert (narrow.lines["ours"], narrow.lines["fla"]) == ([(512, 0.1)], [])
    assert decode.lines["ours"] == [(1, 9.0), (64, 150.0)]
    assert decode.lines["ours, bf16 pool"] == [(64, 100.0)]
    assert decode.lines["floor of reading and writing S"] == [(64, 192.0)]
    attention, products = plots.row_panels(rows)
    assert attention.lines["96 heads"] == [(64, 0.5)]
    assert products.lines == {"64 x 32": [(16, 1.1)]}


def test_the_same_rows_are_drawn_to_the_same_bytes(source: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, of the extra `bench`, is not installed")
    first = plots.draw_all(source, tmp_path / "a")
    again = plots.draw_all(source, tmp_path / "b")
    assert [path.name for path in first] == [
        "kernels-kda.svg", "kernels-kda.png", "kernels-rows.svg", "kernels-rows.png",
    ]  # fmt: skip
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in again]


def test_an_empty_result_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows"):
        plots.read(save("kernels", [], "a GPU", "0123abcd", tmp_path))
