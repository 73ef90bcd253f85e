"""KDA on a GPU: are decode's bits prefill's, how long does a layer take, and how long does fla take beside it.

`python -m benchmarks.kda` on an H200, about four minutes; `--dry` runs what needs no GPU (no graphs, profiles or peers)
with tiny shapes in Triton's interpreter, where times mean nothing. **Never run on a GPU yet**: only the dry run has
been. Each case stands by itself: one that fails is printed and left out, and results are written after each. fla is
timed if fla-core 0.6.0 and einops can be imported; its call starts from conv outputs, ours from conv inputs.
"""

import argparse
import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch

from benchmarks.kda_cases import (
    GATES,
    D,
    Inputs,
    fp64_answer,
    make_inputs,
    make_state,
    prefill_then_decode,
    relative,
    variants,
)
from benchmarks.record import RESULTS, Measurement, commit
from forkpoint.clock import SystemClock
from forkpoint.kernels.kda.triton.launch import PINNED, KdaState, Shapes, decode, prefill
from forkpoint.kernels.kda.triton.plan import decode_facts, prefill_plan

T = TypeVar("T")

PREFILLS = {  # name: heads, lengths, target in ms
    "H96 T512": (96, [512], 0.19),
    "H96 T2048": (96, [2048], 0.42),
    "H96 T8192": (96, [8192], 1.2),
    "H96 8x1024": (96, [1024] * 8, 1.1),
    "H96 6 mixed, 8192": (96, [300, 700, 1200, 1500, 2000, 2492], 1.2),
    "H32 T8192": (32, [8192], 0.8),
    "H96 T32768": (96, [32768], 4.5),
}
DECODES = {1: (5.0, 3.0), 16: (40.0, 25.0), 64: (150.0, 100.0), 256: (580.0, 400.0)}
"""Batch: target and floor (S read once, written once in 16 steps) in microseconds at 96 heads."""
GRAPH_STEPS = 8


class Run:
    """What is shared by the cases: device, time left, results so far."""

    def __init__(self, dry: bool, seconds: float, out: Path, commit_name: str | None) -> None:
        self.dry, self.out = dry, out
        self.device = torch.device("cpu" if dry else "cuda")
        self.ends = time.perf_counter() + seconds
        self.rows: list[Measurement] = []
        today = datetime.fromtimestamp(SystemClock().wall_us() / 1e6, UTC).date().isoformat()
        name = "interpreter, times mean nothing" if dry else torch.cuda.get_device_name()
        self.facts = {"machine": f"{name}, torch {torch.__version__}", "commit": commit_name, "date": today}

    def case(self, name: str, act: Callable[[], list[Measurement]]) -> None:
        """Run one case and flush; a failure is printed and costs this case only."""
        if time.perf_counter() > self.ends:
            print(f"{name}: no time left", flush=True)
            return
        try:
            new = act()
        except Exception:  # noqa: BLE001 (printed; the lease is too short to lose the other cases)
            print(f"{name}: FAILED\n{traceback.format_exc(limit=-4)}", flush=True)
            return
        self.rows += new
        for row in new:
            peer = f"  {row.peer} {row.peer_value:.4g} ({row.peer_value / row.value:.2f}x)" if row.peer_value else ""
            target = f"  target {row.target:g}" if row.target else ""
            print(f"{row.case:40} {row.metric:22} {row.value:10.4g} {row.unit}{peer}{target}", flush=True)
        lines = [json.dumps({"benchmark": "kda", **asdict(row), **self.facts}) for row in self.rows]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def extra(self, name: str, act: Callable[[], T]) -> T | None:
        """A peer or a profile: None if it fails, which must not cost the case its own figures."""
        try:
            return act()
        except Exception as error:  # noqa: BLE001 (printed; see case)
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            return None

    def milliseconds(self, act: Callable[[], object], repeats: int = 10) -> float:
        """Median of CUDA-event times after three warm calls."""
        if self.dry:
            act()
            return 1.0
        for _ in range(3):
            act()
        times = []
        for _ in range(repeats):
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            first.record()
            act()
            last.record()
            torch.cuda.synchronize()
            times.append(first.elapsed_time(last))
        return float(sorted(times)[len(times) // 2])

    def microseconds(self, steps: list[Callable[[], object]]) -> float:
        """One step's time, from replays of a CUDA graph that holds them all."""
        for step in steps:
            step()
        if self.dry:
            return 1.0
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for step in steps:
                step()
        return self.milliseconds(graph.replay) * 1e3 / len(steps)


def equality(run: Run, gate: str, shapes: Shapes, name: str) -> list[Measurement]:
    """1 if decode and prefill agree to the bit, and the pinned shapes' prefill with this one; errors against fp64."""
    tokens, heads = (32, 1) if run.dry else (208, 4)
    torch.manual_seed(7)
    inputs = make_inputs(tokens, heads, GATES[gate], run.device)
    pinned_o, pinned_S = prefill_then_decode(inputs, tokens, PINNED)
    one_o, one_S = prefill_then_decode(inputs, tokens, shapes)
    two_o, two_S = prefill_then_decode(inputs, 5 if not run.dry else 27, shapes)
    same = all(torch.equal(a, b) for a, b in ((pinned_o, one_o), (pinned_S, one_S), (one_o, two_o), (one_S, two_S)))
    case = f"equality {gate} {name}"
    rows = [Measurement(case, "bit-equal", "", float(same), target=1.0)]
    if shapes == PINNED:
        o, state = fp64_answer(inputs)
        rows.append(Measurement(case, "o RMSE ratio", "", relative(one_o, o), target=5e-3))
        rows.append(Measurement(case, "S RMSE ratio", "", relative(one_S, state), target=3.6e-3))
    return rows


def _fla_prefill(run: Run, inputs: Inputs, lengths: list[int]) -> float | None:
    """fla's chunk_kda on rows of the same shape, norms, gate and beta included; None in a dry run."""
    if run.dry:
        return None
    from fla.ops.kda import chunk_kda

    rows, heads = inputs.b.shape
    q, k, v = (inputs.x.view(rows, 3, heads, D)[None, :, i].contiguous() for i in range(3))
    bounds = torch.tensor([sum(lengths[:n]) for n in range(len(lengths) + 1)], device=run.device)
    state = torch.zeros(len(lengths), heads, D, D, device=run.device)
    weights = inputs.weights
    options: dict[str, Any] = {
        "A_log": weights.A_log,
        "dt_bias": weights.dt_bias.flatten(),
        "initial_state": state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "safe_gate": True,
        "lower_bound": weights.lower_bound,
        "cu_seqlens": bounds if len(lengths) > 1 else None,
    }
    with torch.no_grad():
        return run.milliseconds(lambda: chunk_kda(q, k, v, inputs.z.view(1, rows, heads, D), inputs.b[None], **options))


def _kernel_times(run: Run, act: Callable[[], object], case: str) -> list[Measurement]:
    """Each kernel's own time in one call, by the profiler."""
    if run.dry:
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            act()
        torch.cuda.synchronize()
    found = [event for event in profile.key_averages() if event.key.endswith("_kernel")]
    return [Measurement(case, event.key, "ms", event.self_device_time_total / 5e3) for event in found]


def prefill_case(run: Run, name: str) -> list[Measurement]:
    """One row of the prefill table, with and without checkpoints at every 4th tile."""
    heads, lengths, target = PREFILLS[name]
    if run.dry:
        heads, lengths = 1, [min(20 + n, 24) for n in range(min(len(lengths), 2))]
    inputs = make_inputs(sum(lengths), heads, -5.0, run.device)
    state = make_state(len(lengths) + 1, heads, run.device)
    bounds = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    slots, starts = list(range(1, len(lengths) + 1)), [0] * len(lengths)
    plan = prefill_plan(slots, bounds, starts, run.device)
    rows = inputs.rows(0, sum(lengths))
    ours = partial(prefill, *rows, inputs.weights, state, plan)
    value, peer = run.milliseconds(ours), run.extra("fla", partial(_fla_prefill, run, inputs, lengths))
    case = f"prefill {name}"
    results = [
        Measurement(case, "conv inputs to o, S", "ms", value, "fla chunk_kda" if peer else None, peer, None, target)
    ]
    results += run.extra("profile", partial(_kernel_times, run, ours, case)) or []
    if len(lengths) == 1:
        wanted = {(0, at): row for row, at in enumerate(range(16 if run.dry else 8192, lengths[0] + 1, 8192))}
        if wanted:
            pool = torch.empty(len(wanted), heads, D, D, device=run.device)
            with_pool = prefill_plan(slots, bounds, starts, run.device, wanted)
            cost = run.milliseconds(partial(prefill, *rows, inputs.weights, state, with_pool, pool))
            results.append(Measurement(case, "checkpoints, every 8192", "%", 100 * (cost / value - 1), target=3.0))
    return results


def prefill_shapes(run: Run) -> list[Measurement]:
    """Prefill of H96 T8192 at every variant."""
    heads, tokens = (1, 20) if run.dry else (96, 8192)
    inputs, state = make_inputs(tokens, heads, -5.0, run.device), make_state(2, heads, run.device)
    plan = prefill_plan([1], [0, tokens], [0], run.device)
    rows, results = inputs.rows(0, tokens), []
    for name, shapes in variants():
        if name.startswith(("pinned", "prepare", "recur")):
            ours = partial(prefill, *rows, inputs.weights, state, plan, None, shapes)
            results.append(Measurement(f"prefill H96 T8192, {name}", "all kernels", "ms", run.milliseconds(ours, 5)))
    return results


def _decode_steps(run: Run, inputs: Inputs, state: KdaState, batch: int, shapes: Shapes) -> list[Callable[[], object]]:
    """Steps over changing slots, so that a small batch does not live in the cache; row n at place n % 16."""
    order = torch.Generator().manual_seed(batch)
    steps: list[Callable[[], object]] = []
    rows = inputs.rows(0, batch)
    for _ in range(1 if run.dry else GRAPH_STEPS):
        slots = torch.randperm(state.S.shape[0], generator=order)[:batch].tolist()
        facts = decode_facts(slots, [16 + n % 16 for n in range(batch)], run.device)
        steps.append(partial(decode, *rows, inputs.weights, state, facts, shapes))
    return steps


def _fla_decode(run: Run, inputs: Inputs, state: KdaState, batch: int) -> float | None:
    """fla's recurrent kernel over the same pool: it moves S on in place, so the state must be re-read by nobody."""
    if run.dry:
        return None
    from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

    heads, weights = inputs.heads, inputs.weights
    q, k, v = (inputs.x[:batch].view(batch, 3, heads, D)[None, :, i].contiguous() for i in range(3))
    z, b = inputs.z[:batch].view(1, batch, heads, D), inputs.b[None, :batch]
    bounds = torch.arange(batch + 1, device=run.device)
    order = torch.Generator().manual_seed(batch)
    steps: list[Callable[[], object]] = []
    for _ in range(GRAPH_STEPS):
        slots = torch.randperm(state.S.shape[0], generator=order)[:batch].to(run.device)
        options: dict[str, Any] = {
            "A_log": weights.A_log,
            "dt_bias": weights.dt_bias.flatten(),
            "initial_state": state.S,
            "inplace_final_state": True,
            "state_v_first": True,
            "cu_seqlens": bounds,
            "ssm_state_indices": slots,
            "use_qk_l2norm_in_kernel": True,
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "lower_bound": weights.lower_bound,
            "out": torch.empty_like(v),
        }
        steps.append(partial(fused_recurrent_kda_fwd, q, k, v, z, b, **options))
    return run.microseconds(steps)


def decode_case(run: Run, batch: int, pool: torch.dtype, every_shape: bool) -> list[Measurement]:
    """One row of the decode table; conv, norms, gate and the open rows' write included."""
    target, floor = DECODES[batch]
    heads, count = (1, 2) if run.dry else (96, batch)
    inputs = make_inputs(count, heads, -5.0, run.device)
    state = make_state(count + 1 if run.dry else max(2 * batch, 32), heads, run.device, pool)
    case = f"decode H96 B{batch} {str(pool).removeprefix('torch.')}"
    if pool == torch.bfloat16:
        target, floor = {64: 90.0}.get(batch, target / 2), floor / 2
    results = []
    for name, shapes in variants():
        decodes = name.startswith(("pinned", "prepare", "read"))
        if name == "pinned" or (every_shape and decodes):
            value = run.microseconds(_decode_steps(run, inputs, state, count, shapes))
            results.append(Measurement(f"{case}, {name}", "a layer", "us", value, None, None, floor, target))
    step = _decode_steps(run, inputs, state, count, PINNED)[0]
    results += run.extra("profile", partial(_kernel_times, run, step, case)) or []
    peer = run.extra("fla", partial(_fla_decode, run, inputs, state, batch))
    if peer is not None:
        results.append(Measurement(case, "fla recurrent, no conv", "us", peer, None, None, floor))
    return results


def main() -> None:
    """Equality first: times of kernels that disagree are worth nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dry", action="store_true", help="tiny shapes in Triton's interpreter")
    parser.add_argument("--seconds", type=float, default=240.0, help="no case begins after this many")
    parser.add_argument("--out", type=Path, default=RESULTS / "kda.jsonl")
    parser.add_argument("--commit", help="name of the commit, where git can't say it")
    arguments = parser.parse_args()
    if arguments.dry:
        importlib.import_module("tests.support.triton_shim").install()
    run = Run(arguments.dry, arguments.seconds, arguments.out, arguments.commit or commit())
    for gate in GATES:
        for name, shapes in variants():
            run.case(f"equality {gate} {name}", partial(equality, run, gate, shapes, name))
    for batch in (64, 256, 16, 1):
        run.case(f"decode {batch}", partial(decode_case, run, batch, torch.float32, batch == 64))
    for name in PREFILLS:
        run.case(f"prefill {name}", partial(prefill_case, run, name))
    run.case("prefill shapes", partial(prefill_shapes, run))
    run.case("decode 64, bf16 pool", partial(decode_case, run, 64, torch.bfloat16, False))


if __name__ == "__main__":
    main()
