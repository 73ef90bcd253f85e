"""Measure the GPU kernels beside fla, torch and cuBLAS: `python -m benchmarks.kernels` on an H200, about two minutes.

`--warm` runs everything once and times nothing, so that a run after it finds compiled kernels and tuned peers;
`--only` names parts, which several processes may warm at the same time. `--dry` needs no GPU: tiny shapes in Triton's
interpreter, equality checks only. fla is timed if fla-core 0.6.0 and einops can be imported. Each case stands by
itself: one that fails is written as a line of its own, and the results are saved after each.
"""

import argparse
import importlib
import os
import sys
import time
from pathlib import Path

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import torch

from benchmarks.kernels.run import Case, Mode, Run
from benchmarks.record import RESULTS, Measurement, known_commit, save

PARTS = ("kda-prefill", "kda-decode", "mla", "matmul", "norms", "experts", "sampler", "staging")


def cases_of(part: str, run: Run) -> list[Case]:
    """The cases of one part; its kernels are imported here, so that one that cannot be leaves the others be."""
    module = importlib.import_module(f"benchmarks.kernels.{part.replace('-', '_')}")
    found: list[Case] = module.cases(run)
    return found


def failed(case: str, error: Exception) -> Measurement:
    """The line of a case that raised."""
    print(f"{case}: {type(error).__name__}: {str(error)[:500]}", file=sys.stderr, flush=True)
    return Measurement(case, f"failed: {type(error).__name__}", "equal", 0.0, target=1.0)


def line(row: Measurement) -> str:
    """A row of the printed table."""
    spread = f"{row.p10:.4g}-{row.p90:.4g}" if row.p10 is not None and row.p90 is not None else ""
    peer = f"{row.peer} {row.peer_value:.4g} ({row.peer_value / row.value:.2f}x)" if row.peer_value else ""
    floor = f"floor {row.floor:.4g} ({row.floor / row.value:.0%})" if row.floor else ""
    worse = row.unit == "equal" and row.target is not None and row.value < row.target
    if row.unit != "equal" and row.target is not None:
        worse = row.value > row.target
    target = f"{'MISSES' if worse else 'meets'} {row.target:.4g}" if row.target is not None else ""
    figure = f"{row.case:40} {row.metric:40} {row.value:10.4g} {row.unit:6} {spread:16}"
    return f"{figure} {peer:40} {floor:22} {target}".rstrip()


def measure(run: Run, parts: list[str], ends: float, keep: Path | None, facts: tuple[str, str]) -> list[Measurement]:
    """All cases of the parts, saved to the folder `keep` after each; none begins after `ends`."""
    rows: list[Measurement] = []
    for part in parts:
        try:
            cases = cases_of(part, run)
        except Exception as error:  # noqa: BLE001 (a compiler's, a driver's or torch's: the next part goes on)
            rows.append(failed(part, error))
            continue
        for name, case in cases:
            if time.perf_counter() > ends:
                print(f"{name}: no time left", file=sys.stderr, flush=True)
                continue
            torch.manual_seed(0)
            try:
                for row in case():
                    rows.append(row)
                    print(line(row), flush=True)
            except Exception as error:  # noqa: BLE001 (see above)
                rows.append(failed(name, error))
            if run.device.type == "cuda":
                torch.cuda.empty_cache()
            if keep is not None:
                save("kernels", rows, *facts, folder=keep)
    return rows


def main() -> int:
    """Exit status 1 when a case failed or found unequal bits."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between")
    parser.add_argument("--seconds", type=float, default=900.0, help="no case begins after this many")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of kernels.jsonl")
    parser.add_argument("--commit", help="name of the commit, where git can't say it")
    parser.add_argument("--warm", action="store_true", help="run everything once, write nothing")
    parser.add_argument("--dry", action="store_true", help="tiny shapes in Triton's interpreter, write nothing")
    arguments = parser.parse_args()
    parts = arguments.only.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    ends = time.perf_counter() + arguments.seconds
    mode = Mode.DRY if arguments.dry else Mode.WARM if arguments.warm else Mode.TIME
    if arguments.dry:
        importlib.import_module("tests.support.triton_shim").install()
    elif not torch.cuda.is_available():
        parser.error("needs a GPU, or --dry")
    run = Run(mode, torch.device("cpu" if arguments.dry else "cuda"))
    name = "no GPU" if arguments.dry else torch.cuda.get_device_name()
    facts = f"{name}, torch {torch.__version__}", arguments.commit or known_commit()
    rows = measure(run, parts, ends, arguments.out if mode is Mode.TIME else None, facts)
    return int(any(row.unit == "equal" and row.value != 1.0 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
