"""warm_up: run an engine before it serves, so that the first calls find everything loaded."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from forkpoint.limits import PAGE_TOKENS, PREFILL_CHUNK_TOKENS_DEFAULT
from forkpoint.server.engine.base import Engine
from forkpoint.server.engine.batch import Sample, Work

SEQUENCES_MAX: Final = 64
"""Of a batch that is run."""
STEPS: Final = 3
"""On a GPU a step is done as it is, then recorded, then replayed."""


def warm_up(engine: Engine, thorough: bool) -> None:
    """A chunk and a decode step; every sequence is freed again.

    `thorough`: also what later calls would wait for on a GPU, whose kernels are compiled and whose steps are recorded
    when they come first: a whole chunk, batches of many sizes, both ways to sample, a capture, a restore.
    """
    with _sequences(engine, 1) as (sequence,):
        engine.step([Work(sequence, 0, (0,) * 17)])
        engine.step([Work(sequence, 17, (0,))])
        if thorough:
            _stage(engine, sequence)
    if thorough:
        _prefill(engine)
        capacity = engine.capacity()
        most = min(capacity.slots_free, capacity.pages_free, SEQUENCES_MAX)
        for exponent in range(most.bit_length()):
            _decode(engine, 1 << exponent)


@contextmanager
def _sequences(engine: Engine, count: int) -> Iterator[list[int]]:
    made: list[int] = []
    try:
        for _ in range(count):
            made.append(engine.create())
        yield made
    finally:
        for sequence in made:
            engine.free(sequence)


def _stage(engine: Engine, sequence: int) -> None:
    captured, capacity = engine.capture(sequence), engine.capacity()
    if capacity.slots_free and capacity.pages_free:
        restored = engine.begin_restore(captured.grid_position)
        try:
            for spec, data in captured.parts:
                engine.load_part(restored, spec, data)
            engine.end_restore(restored)
        finally:
            engine.free(restored)


def _prefill(engine: Engine) -> None:
    room = engine.capacity().pages_free * PAGE_TOKENS
    tokens = min(PREFILL_CHUNK_TOKENS_DEFAULT, room, engine.facts.context_limit)
    for _ in range(STEPS):
        with _sequences(engine, 1) as (sequence,):
            engine.step([Work(sequence, 0, (0,) * tokens)])


def _decode(engine: Engine, count: int) -> None:
    with _sequences(engine, count) as sequences:
        for at in range(STEPS):
            sample = Sample(1.0, 50 * (at % 2), 1.0, 0.0, 0)
            engine.step([Work(sequence, at, (0,), sample) for sequence in sequences])
