"""The benchmark of the row kernels runs through on tiny shapes: its first run on a GPU must not be lost to a typo."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks import rows
from forkpoint.kernels.matmul.configs import Tile
from tests.support.triton_shim import DEVICE

TINY = rows.Scale(
    products=((64, 32),),
    rows=(1, 17),
    equal_rows=18,
    widths=(128,),
    norm_rows=4,
    heads=(4,),
    context=65,
    batches=(1, 2),
    prompt=1,
    tail=5,
    latent=(16, 16),
    vocabulary=300,
    sampled=2,
    tiles=(Tile(16, 32, 4, 2), Tile(64, 32, 4, 2, persistent=True)),
)


def test_every_case_of_the_benchmark_runs_and_finds_equal_bits() -> None:
    torch.manual_seed(0)

    def once(call: Callable[[], object], captured: bool) -> float:
        call()
        return 1.0

    found = rows.measure(rows.Run(DEVICE, TINY, once))
    assert [row for row in found if row.unit == "equal" and row.value != 1.0] == []
    assert {row.case.split()[0] for row in found} >= {"linear", "mla", "sample", "rms_norm", "swiglu"}
    assert any(row.peer == "cuBLAS" for row in found)


def test_a_case_that_raises_leaves_a_line_and_the_rest_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: rows.Run) -> rows.Rows:
        raise RuntimeError("out of memory")

    for name in ("product_equality", "product_times", "attention_equality", "attention_times"):
        monkeypatch.setattr(rows, name, lambda run, *shape: iter(()))
    monkeypatch.setattr(rows, "sampling", broken)
    found = rows.measure(rows.Run(DEVICE, TINY, lambda call, captured: 1.0))
    assert [row.metric for row in found if row.case == "sampling"] == ["failed: RuntimeError"]
    assert any(row.case.startswith("swiglu") for row in found)
