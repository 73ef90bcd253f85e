"""How a kernel is timed: many samples, every contender in turn, so that a ratio comes from one stretch of one run."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch
from torch import Tensor

from benchmarks.record import Measurement

COPY_BYTES_A_US: Final = 4.2e6
"""Floors: device copy of an NVIDIA H200, bytes read and written."""
FLOP_A_US: Final = 740e6
"""Floors: a bf16 product of 8192^3 on that machine."""
COLD_BYTES: Final = 200_000_000
"""A call whose operands are smaller gets several sets of them in turn: its L2 holds 50 MB."""
SAMPLES_MIN: Final = 9
SAMPLES_MAX: Final = 60
SAMPLING_SECONDS: Final = 0.25
"""For all contenders of one comparison together."""

Call = Callable[[], object]
Rows = Iterator[Measurement]
Case = tuple[str, Callable[[], Rows]]
OURS: Final = "ours"


class Mode(Enum):
    """What a run is for."""

    TIME = "time"
    WARM = "warm"
    """Call everything once: compilers and autotuners fill their caches."""
    DRY = "dry"
    """Tiny shapes in Triton's interpreter: checks equality and this code, and times nothing."""


@dataclass(frozen=True)
class Times:
    """Microseconds of one call: median, and the bounds of the middle four fifths of the samples."""

    p50: float
    p10: float
    p90: float

    @staticmethod
    def of(samples: list[float]) -> "Times":
        ordered = sorted(samples)
        tenth = len(ordered) // 10
        return Times(statistics.median(ordered), ordered[tenth], ordered[-1 - tenth])


def copies(nbytes: float) -> int:
    """Sets of operands to rotate over, so that none is read from the L2 cache."""
    return min(64, max(1, math.ceil(COLD_BYTES / max(nbytes, 1.0))))


@dataclass
class Run:
    """Where one run measures, and how."""

    mode: Mode
    device: torch.device

    @property
    def dry(self) -> bool:
        return self.mode is Mode.DRY

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(shape, device=self.device, dtype=dtype)

    def compare(self, contenders: dict[str, list[Call]], captured: bool = True) -> dict[str, Times]:
        """Times of a call of each contender, whose calls differ in their operands only.

        captured: replays of one CUDA graph of all calls, so the device's time; otherwise calls from Python as a caller
        would make them, the host's time included where it is longer. Ours must work; a contender that fails is
        reported and left out.
        """
        prepared: dict[str, tuple[Call, int]] = {}
        for name, calls in contenders.items():
            try:
                prepared[name] = (self._prepare(calls, captured), len(calls))
            except Exception as error:
                if name == OURS:
                    raise
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr, flush=True)
        if self.mode is not Mode.TIME:
            return {name: Times(1.0, 1.0, 1.0) for name in prepared}
        samples: dict[str, list[float]] = {name: [] for name in prepared}
        for act, _ in prepared.values():
            act()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for done in range(SAMPLES_MAX):
            if done >= SAMPLES_MIN and time.perf_counter() - began > SAMPLING_SECONDS:
                break
            for name, (act, count) in prepared.items():
                samples[name].append(self._once(act) / count)
        return {name: Times.of(each) for name, each in samples.items()}

    def _prepare(self, calls: list[Call], captured: bool) -> Call:
        if self.mode is not Mode.TIME:
            calls[0]()
            return calls[0]
        for call in calls:  # also fills what a call keeps for its operands
            call()
        torch.cuda.synchronize()
        if not captured:
            return lambda: [call() for call in calls]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        return graph.replay

    def _once(self, act: Call) -> float:
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        act()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) * 1e3

    def kernels(self, call: Call) -> dict[str, float]:
        """Microseconds of each kernel of ours in one call, by the profiler; they may overlap."""
        if self.mode is not Mode.TIME:
            return {}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(5):
                call()
            torch.cuda.synchronize()
        found = [event for event in profile.key_averages() if event.key.endswith("_kernel")]
        return {event.key: event.self_device_time_total / 5 for event in found}


def timed(
    case: str,
    metric: str,
    ours: Times,
    peer: tuple[str, Times | None] = ("", None),
    floor: float | None = None,
    target: float | None = None,
    unit: str = "us",
    predicted: str | None = None,
) -> Measurement:
    """A row of a time in `unit`, us or ms; floor and target are microseconds."""
    by = 1000.0 if unit == "ms" else 1.0

    def scaled(value: float | None) -> float | None:
        return None if value is None else value / by

    name, times = peer
    return Measurement(
        case, metric, unit, ours.p50 / by, name if times else None, times.p50 / by if times else None,
        scaled(floor), scaled(target), ours.p10 / by, ours.p90 / by, predicted,
    )  # fmt: skip


def equal(case: str, metric: str, pairs: list[tuple[Tensor, Tensor]]) -> Measurement:
    """1 when every pair has equal numbers, else 0: then the case's times are worth nothing and are not taken."""
    return Measurement(case, metric, "equal", float(all(torch.equal(a, b) for a, b in pairs)), target=1.0)


def off(ours: Tensor, exact: Tensor) -> float:
    """Root mean square of the error over that of the exact numbers."""
    return float((ours.double() - exact.double()).norm() / exact.double().norm())
