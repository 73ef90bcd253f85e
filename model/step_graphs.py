"""StepGraphs: steps whose shapes come again are recorded as CUDA graphs and replayed.

A step launches hundreds of kernels, and launching a small one takes the host longer than the device takes for it. A
graph launches them all at once. It holds the same kernels with the same arguments, reading tables that are filled anew
for each step, so the bits of a step do not depend on whether it was replayed (ADR 0021).
"""

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from forkpoint.kernels.tables import FixedTables

log = logging.getLogger(__name__)

GRAPHS_MAX: Final = 256
"""Kept at a time; the one whose last use is longest ago goes first."""
SEEN_MAX: Final = 4096
"""Shapes that are remembered as having come once."""

Key = tuple[tuple[int, ...], ...]


class Recorder(Protocol):
    """Records work on a device, to be done again."""

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Something that does `work` again, on the same memory, and returns the same tensor with its new values.
        Does not do it now. Raises RuntimeError where it can't be recorded."""
        ...


class CudaRecorder:
    """Records as CUDA graphs, which share one pool of memory: none is replayed while another one runs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Of other threads, copies of captured state may be under way.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


@dataclass(frozen=True)
class _Graph:
    tables: FixedTables
    replay: Callable[[], Tensor]


class StepGraphs:
    """The graphs of one model over one set of slots and pages. Used from one thread."""

    def __init__(self, device: torch.device, recorder: Recorder, most: int = GRAPHS_MAX) -> None:
        self._device, self._recorder, self._most = device, recorder, most
        self._graphs: OrderedDict[Key, _Graph] = OrderedDict()
        self._seen: OrderedDict[Key, None] = OrderedDict()
        self.can_record = True
        """False once a recording failed: then no other is tried."""

    def run(self, tables: list[Tensor], work: Callable[[list[Tensor]], Tensor]) -> Tensor | None:
        """What `work` makes of the tables, put on the device, in memory that is the caller's. None where the caller
        must do the work otherwise: their shapes have not come before, or nothing can be recorded.

        For tables of equal shapes `work` is taken to be the same, whichever call brought it.
        """
        if not self.can_record:
            return None
        key = tuple(tuple(table.shape) for table in tables)
        if (graph := self._graphs.get(key)) is not None:
            self._graphs.move_to_end(key)
            graph.tables.fill(tables)
            return graph.replay().clone()
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > SEEN_MAX:
                self._seen.popitem(last=False)
            return None
        fixed = FixedTables(tables, self._device)
        # This is the step; it also compiles and loads all that a recording can't.
        result = work(fixed.parts)
        self._record(key, fixed, work)
        return result

    def _record(self, key: Key, tables: FixedTables, work: Callable[[list[Tensor]], Tensor]) -> None:
        try:
            replay = self._recorder.record(lambda: work(tables.parts))
        except RuntimeError as error:
            self.can_record = False
            self._graphs.clear()
            log.warning("steps are not recorded as CUDA graphs, and take longer: %s", error)
            return
        self._graphs[key] = _Graph(tables, replay)
        del self._seen[key]
        if len(self._graphs) > self._most:
            self._graphs.popitem(last=False)
