"""Norms and SwiGLU beside torch's own and beside their bytes."""

from functools import partial

import torch
from torch.nn import functional

from benchmarks.kernels.run import COPY_BYTES_A_US, OURS, Call, Case, Rows, Run, copies, equal, timed
from forkpoint.kernels.ffn import triton as ffn
from forkpoint.kernels.norm import triton as norm

WIDTHS = (7168, 2304, 128)
ROWS = 8192
EPS = 1e-6


def times(run: Run, width: int) -> Rows:
    """RMS norms of one width, plain, after a residual sum, and gated; bf16 rows, fp32 weight."""
    rows, width = (4, 128) if run.dry else (ROWS, width)
    weight = run.random(width, dtype=torch.float32)
    sets = [run.random(3, rows, width) for _ in range(1 if run.dry else copies(6 * rows * width))]
    x = sets[0][0]
    whole = norm.rms_norm(x, weight, EPS)
    case = f"rms_norm {rows} x {width}"
    same = equal(case, "row alone", [(norm.rms_norm(x[n : n + 1], weight, EPS), whole[n : n + 1]) for n in (0, 3)])
    yield same
    if not same.value:
        return
    low, moved = weight.to(x.dtype), 2 * rows * width / COPY_BYTES_A_US
    ours: list[Call] = [partial(norm.rms_norm, s[0], weight, EPS) for s in sets]
    torchs: list[Call] = [partial(functional.rms_norm, s[0], (width,), low, EPS) for s in sets]
    found = run.compare({OURS: ours, "torch": torchs})
    yield timed(case, "time", found[OURS], ("torch", found.get("torch")), 2 * moved)
    ours = [partial(norm.add_rms_norm, s[0], s[1], weight, EPS) for s in sets]
    torchs = [partial(lambda a, b: functional.rms_norm(a + b, (width,), low, EPS), s[0], s[1]) for s in sets]
    found = run.compare({OURS: ours, "torch": torchs})
    yield timed(f"add_{case}", "time", found[OURS], ("torch", found.get("torch")), 4 * moved)
    ours = [partial(norm.gated_rms_norm, s[0], s[2], weight, EPS) for s in sets]
    torchs = [
        partial(lambda a, g: functional.rms_norm(a, (width,), low, EPS) * torch.sigmoid(g), s[0], s[2]) for s in sets
    ]
    found = run.compare({OURS: ours, "torch": torchs})
    yield timed(f"gated_{case}", "time", found[OURS], ("torch", found.get("torch")), 3 * moved)


def swiglu(run: Run, width: int) -> Rows:
    """Both halves of one product, as a layer has them."""
    rows, width = (4, 128) if run.dry else (ROWS, width)
    both = run.random(rows, 2 * width)
    gate, up = both[:, :width], both[:, width:]
    ours: list[Call] = [partial(ffn.glu, gate, up)]
    found = run.compare({OURS: ours, "torch": [lambda: functional.silu(gate) * up]})
    floor = 6 * rows * width / COPY_BYTES_A_US
    yield timed(f"swiglu {rows} x {width}", "time", found[OURS], ("torch", found.get("torch")), floor)


def cases(run: Run) -> list[Case]:
    """Hidden sizes of both models, and a head."""
    norms: list[Case] = [(f"norms {width}", partial(times, run, width)) for width in WIDTHS]
    return [*norms, ("swiglu", partial(swiglu, run, 7168))]
