"""When a step is done as it is, when it is recorded and when it is replayed. tests/gpu replays real graphs."""

from collections.abc import Callable

import torch
from torch import Tensor

from forkpoint.model.step_graphs import StepGraphs

CPU = torch.device("cpu")


class Fake:
    """Records by keeping the work; counts what is recorded and replayed. `broken`: as a driver that can't."""

    def __init__(self, broken: bool = False) -> None:
        self.recorded = self.replayed = 0
        self.broken = broken
        self.result = torch.zeros(1, dtype=torch.int64)

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if self.broken:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded += 1

        def replay() -> Tensor:
            self.replayed += 1
            return self.result.copy_(work())

        return replay


def total(tables: list[Tensor]) -> Tensor:
    return sum((table.sum() for table in tables), torch.zeros(1, dtype=torch.int64))


def step(graphs: StepGraphs, *sizes: int, value: int = 1) -> int | None:
    found = graphs.run([torch.full((size,), value, dtype=torch.int32) for size in sizes], total)
    return None if found is None else int(found)


def test_shapes_are_recorded_when_they_come_again_and_then_replayed_with_new_values() -> None:
    recorder = Fake()
    graphs = StepGraphs(CPU, recorder)
    assert step(graphs, 3, 2) is None and recorder.recorded == 0
    assert step(graphs, 3, 2, value=2) == 10 and (recorder.recorded, recorder.replayed) == (1, 0)
    assert step(graphs, 2, 3) is None, "other shapes"
    assert step(graphs, 3, 2, value=5) == 25 and (recorder.recorded, recorder.replayed) == (1, 1)


def test_what_was_returned_is_not_overwritten_by_the_next_replay() -> None:
    graphs = StepGraphs(CPU, Fake())
    for _ in range(2):
        step(graphs, 4)
    first = graphs.run([torch.full((4,), 7, dtype=torch.int32)], total)
    step(graphs, 4, value=1)
    assert first is not None and int(first) == 28


def test_the_graph_that_is_longest_unused_goes_first() -> None:
    recorder = Fake()
    graphs = StepGraphs(CPU, recorder, most=2)
    for size in (1, 2):
        assert [step(graphs, size), step(graphs, size)] == [None, size]
    assert step(graphs, 1) == 1
    assert [step(graphs, 3), step(graphs, 3)] == [None, 3]
    assert (step(graphs, 1), step(graphs, 3), step(graphs, 2)) == (1, 3, None)
    assert recorder.recorded == 3


def test_after_a_recording_that_failed_every_step_is_done_as_it_is() -> None:
    recorder = Fake(broken=True)
    graphs = StepGraphs(CPU, recorder)
    assert step(graphs, 3) is None
    assert step(graphs, 3) == 3, "the step itself was done"
    recorder.broken = False
    assert step(graphs, 3) is None and not graphs.can_record
