"""Row-invariant products at their pinned tiles beside cuBLAS, whose rows depend on the batch."""

from functools import partial

import torch

from benchmarks.kernels.run import COPY_BYTES_A_US, FLOP_A_US, OURS, Call, Case, Rows, Run, copies, equal, off, timed
from benchmarks.record import Measurement
from forkpoint.kernels.matmul import triton as matmul

PRODUCTS = ((7168, 12288), (12288, 7168), (2304, 4096), (2304, 12576), (7168, 49376), (9216, 2304), (2304, 163840))
"""(K, N): the table's three, then inputs of KDA layers of both models in one product, a wide K, logits."""
ROWS = (1, 16, 64, 256, 1024, 8192)
DRY = ((64, 32), (1, 17))


def equality(run: Run, inputs: int, outputs: int) -> Rows:
    """A row alone against the same row in batches that take other tiles."""
    rows = DRY[1] if run.dry else ROWS[:-1]
    x, weight = run.random(max(rows), inputs), run.random(outputs, inputs) * inputs**-0.5
    case = f"linear K {inputs} N {outputs}"
    alone = matmul.linear(x[:1], weight)
    yield equal(case, "row alone equals its batch", [(alone, matmul.linear(x[:n], weight)[:1]) for n in rows])
    exact = x[:1].double() @ weight.double().T
    yield Measurement(case, "against fp64", "error", off(alone, exact))


def times(run: Run, inputs: int, outputs: int, rows: int) -> Rows:
    """bf16 in and out; weights from memory, not from the L2 cache, as in a model."""
    case = f"linear K {inputs} N {outputs} M {rows}"
    moved = 2 * (rows * inputs + outputs * inputs + rows * outputs)
    floor = max(moved / COPY_BYTES_A_US, 2 * rows * inputs * outputs / FLOP_A_US)
    x = run.random(rows, inputs)
    weights = [run.random(outputs, inputs) for _ in range(1 if run.dry else copies(2 * outputs * inputs))]
    ours: list[Call] = [partial(matmul.linear, x, weight, torch.bfloat16) for weight in weights]
    cublas: list[Call] = [partial(torch.nn.functional.linear, x, weight) for weight in weights]
    found = run.compare({OURS: ours, "cuBLAS": cublas})
    allowed = 1.05 if rows <= 64 else 1.10 if rows >= 1024 else None
    target = None if allowed is None else found["cuBLAS"].p50 * allowed
    yield timed(case, "time", found[OURS], ("cuBLAS", found["cuBLAS"]), floor, target)


def cases(run: Run) -> list[Case]:
    """All shapes; the widest ones leave out the longest batch."""
    if run.dry:
        (k, n), rows = DRY
        return [("linear", partial(equality, run, k, n)), *(("linear", partial(times, run, k, n, m)) for m in rows)]
    found: list[Case] = [(f"linear {k} {n}", partial(equality, run, k, n)) for k, n in PRODUCTS]
    for k, n in PRODUCTS:
        some = [m for m in ROWS if m * n < 1 << 29]
        found += [(f"linear {k} {n} {m}", partial(times, run, k, n, m)) for m in some]
    return found
