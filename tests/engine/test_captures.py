"""Captures without the pages that a store has already."""

from itertools import pairwise

from forkpoint.server.engine.runner import TorchEngine
from tests.support.engines import consume

TOKENS = [position % 89 for position in range(200)]


def test_full_pages_that_are_known_are_left_out_and_all_else_is_there(engine: TorchEngine) -> None:
    sequence = engine.create()
    consume(engine, sequence, TOKENS)
    whole = engine.capture(sequence)
    full = [f"mla.page.{index:06d}" for index in range(3)]
    assert whole.settled == set(full) == set(engine.settled_parts(192))
    assert whole.specs == tuple(spec for spec, _ in whole.parts) == engine.parts(192)
    some = engine.capture(sequence, {full[0], full[2], "kda.000.state.0", "mla.page.000003", "no such part"})
    assert some.specs == whole.specs and some.settled == whole.settled
    assert some.parts == tuple(part for part in whole.parts if part[0].name not in (full[0], full[2]))
    assert engine.capture(sequence) == whole, "a capture takes nothing away"


def test_a_page_is_settled_once_it_is_full_and_stays_what_it_is(engine: TorchEngine) -> None:
    sequence = engine.create()
    seen = []
    for first, last in pairwise([0, 48, 64, 80, 128, 143]):
        consume(engine, sequence, TOKENS[first:last])
        captured = engine.capture(sequence)
        assert len(captured.settled) == last // 16 * 16 // 64
        seen.append({spec.name: data for spec, data in captured.parts if spec.name in captured.settled})
    for earlier, later in pairwise(seen):
        assert earlier.items() <= later.items()
    assert engine.settled_parts(0) == ()
