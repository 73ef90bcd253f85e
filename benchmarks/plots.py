"""Draw benchmarks/results/kernels.jsonl: `python -m benchmarks.plots`, on any machine with the extra `bench`.

The same file gives the same bytes. Nothing is computed here but ratios of numbers of one row.
"""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.record import RESULTS

Row = dict[str, Any]
Points = list[tuple[float, float]]
PREFILL: Final = "conv inputs to o and S"
DECODE: Final = "a layer, conv inputs to o"
COLOURS: Final = {
    "ours": "#0f766e", "ours, bf16 pool": "#5eead4", "fla": "#b45309", "fla with its conv": "#f59e0b",
    "floor": "#64748b", "floor of reading and writing S": "#cbd5e1",
}  # fmt: skip
CYCLE: Final = ("#0f766e", "#b45309", "#4338ca", "#be185d", "#64748b", "#65a30d", "#0891b2", "#78350f")


@dataclass(frozen=True)
class Panel:
    """One pair of axes: lines by name, each a list of (x, y)."""

    title: str
    x: str
    y: str
    lines: dict[str, Points]
    log_y: bool = True
    guides: dict[str, float] = field(default_factory=dict)
    """Horizontal lines."""


def read(path: Path) -> list[Row]:
    """Rows of a result file. Raises ValueError when there are none."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def points(rows: list[Row], case: str, metric: str, value: Callable[[Row], float | None], peer: str = "") -> Points:
    """(number that the first group of `case` matches, value) of each row whose whole case and metric fit, ascending."""
    found: dict[float, float] = {}
    for row in rows:
        match = re.fullmatch(case, row["case"])
        if match and row["metric"] == metric and (not peer or row["peer"] == peer):
            y = value(row)
            if y is not None:
                found[float(match[1])] = y
    return sorted(found.items())


def _of(name: str) -> Callable[[Row], float | None]:
    return lambda row: row[name]


def _share(row: Row) -> float | None:
    return row["floor"] / row["value"] if row["floor"] else None


def _ratio(row: Row) -> float | None:
    return row["value"] / row["peer_value"] if row["peer_value"] else None


def kda_panels(rows: list[Row]) -> list[Panel]:
    """Prefill against T for both models' heads, decode against the batch."""
    panels = []
    for heads in (96, 32):
        case = rf"prefill H{heads} T(\d+)"
        lines = {
            "ours": points(rows, case, PREFILL, _of("value")),
            "fla": points(rows, case, PREFILL, _of("peer_value"), "fla chunk_kda"),
            "fla with its conv": points(rows, case, PREFILL, _of("peer_value"), "fla conv + chunk_kda"),
            "floor": points(rows, case, PREFILL, _of("floor")),
        }
        panels.append(Panel(f"Prefill of one sequence, {heads} heads", "tokens", "ms a layer", lines))
    case = r"decode H96 batch (\d+) float32"
    lines = {
        "ours": points(rows, case, DECODE, _of("value")),
        "ours, bf16 pool": points(rows, r"decode H96 batch (\d+) bfloat16", DECODE, _of("value")),
        "fla": points(rows, case, DECODE, _of("peer_value"), "fla recurrent"),
        "floor of reading and writing S": points(rows, case, "floor of any recurrent kernel", _of("value")),
        "floor": points(rows, case, DECODE, _of("floor")),
    }
    panels.append(Panel("Decode, 96 heads, fp32 pool", "sessions", "µs a layer", lines))
    return panels


def row_panels(rows: list[Row]) -> list[Panel]:
    """Attention's share of its floor against the batch, products' ratio to cuBLAS against M."""
    shares = {
        f"{heads} heads": points(rows, rf"mla H{heads} context 32768 batch (\d+) x 1", "a layer", _share)
        for heads in (96, 32)
    }
    ratios: dict[str, Points] = {}
    for row in rows:
        if match := re.fullmatch(r"linear K (\d+) N (\d+) M \d+", row["case"]):
            shape = rf"linear K {match[1]} N {match[2]} M (\d+)"
            ratios.setdefault(f"{match[1]} x {match[2]}", points(rows, shape, "time", _ratio))
    return [
        Panel("MLA decode, 32k tokens: share of its floor", "sessions", "floor / time", shares, False, {"target": 0.8}),
        Panel("Products (K x N): time over cuBLAS's", "rows M", "ratio", ratios, False, {"cuBLAS": 1.0}),
    ]


def draw(panels: list[Panel], note: str, to: Path) -> list[Path]:
    """Writes `to` as .svg and .png; returns both paths."""
    import matplotlib

    matplotlib.use("Agg")
    # Text as outlines and ids from a fixed salt: the same rows give the same bytes.
    matplotlib.rcParams.update({"svg.hashsalt": "forkpoint", "svg.fonttype": "path", "font.size": 9})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 3.6), layout="constrained")
    for axis, panel in zip(axes, panels, strict=True):
        for (name, line), other in zip(panel.lines.items(), CYCLE * 2, strict=False):
            if not line:
                continue
            floor = name.startswith("floor")
            style = {"linestyle": "--", "linewidth": 1.2} if floor else {"marker": "o", "markersize": 3.5}
            axis.plot(*zip(*line, strict=True), label=name, color=COLOURS.get(name, other), **style)
        for name, height in panel.guides.items():
            axis.axhline(height, color="#94a3b8", linewidth=1.0, linestyle=":", label=name)
        axis.set_xscale("log", base=2)
        if panel.log_y:
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0.0)
        ticks = sorted({x for line in panel.lines.values() for x, _ in line})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_xticks([], minor=True)
        axis.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axis.grid(color="#e2e8f0", linewidth=0.6)
        axis.legend(fontsize=7, frameon=False)
    figure.supxlabel(note, fontsize=7, color="#64748b")
    to.parent.mkdir(parents=True, exist_ok=True)
    written = [to.with_suffix(".svg"), to.with_suffix(".png")]
    figure.savefig(written[0], metadata={"Date": None})
    figure.savefig(written[1], dpi=150, metadata={"Software": None})
    pyplot.close(figure)
    return written


def draw_all(source: Path, folder: Path) -> list[Path]:
    """Both figures of a result file; returns what was written."""
    rows = read(source)
    commits = " and ".join(dict.fromkeys(row["commit"] for row in rows))
    note = f"{rows[0]['machine']}, commit {commits}, {rows[0]['date']}"
    written = draw(kda_panels(rows), note, folder / "kernels-kda")
    return written + draw(row_panels(rows), note, folder / "kernels-rows")


def main() -> None:
    """Writes kernels-kda and kernels-rows, each as SVG and PNG."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plots", description=__doc__)
    parser.add_argument("--source", type=Path, default=RESULTS / "kernels.jsonl")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    for path in draw_all(arguments.source, arguments.out):
        print(path)


if __name__ == "__main__":
    main()
