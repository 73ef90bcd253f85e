"""Steps of TorchEngine: what it refuses, what a failure leaves, and that numbers which left the range are caught."""

import math
from collections.abc import Callable

import pytest

from forkpoint.errors import ContextFullError, NodeCapacityError, TokenOutOfRangeError
from forkpoint.model.kernels import Step
from forkpoint.model.residual import Stream
from forkpoint.server.engine.base import Engine
from forkpoint.server.engine.batch import Sample, Work
from forkpoint.server.engine.errors import NonFiniteLogitsError, NonFiniteStateError
from forkpoint.server.engine.runner import TorchEngine
from forkpoint.server.engine.warm_up import warm_up
from tests.support.engines import GREEDY, MakeEngine, consume, decode, state_digest


def test_the_engine_fits_its_port(engine: TorchEngine) -> None:
    port: Engine = engine
    assert port.capacity().slots_free == port.capacity().slots_total == 4
    assert port.capacity().slot_bytes == engine.tensors.layout.slot_bytes()
    assert port.step([]) == []


def test_handles_are_never_reused(engine: TorchEngine) -> None:
    seen = set()
    for _ in range(20):
        sequence = engine.create()
        assert sequence not in seen
        seen.add(sequence)
        engine.free(sequence)


def test_an_unknown_handle_is_a_key_error(engine: TorchEngine) -> None:
    calls: list[Callable[[], object]] = [
        lambda: engine.free(7),
        lambda: engine.fork(7),
        lambda: engine.consumed(7),
        lambda: engine.can_sample(7),
        lambda: engine.pages_needed(7, 1),
        lambda: engine.step([Work(7, 0, (1,))]),
        lambda: engine.capture(7),
        lambda: engine.load_part(7, engine.parts(0)[0], b""),
        lambda: engine.end_restore(7),
    ]
    for call in calls:
        with pytest.raises(KeyError):
            call()


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (Sample(-0.1, 0, 1.0, 0.0, 0), "temperature"),
        (Sample(math.nan, 0, 1.0, 0.0, 0), "temperature"),
        (Sample(math.inf, 0, 1.0, 0.0, 0), "temperature"),
        (Sample(1.0, -1, 1.0, 0.0, 0), "top_k"),
        (Sample(1.0, 0, 0.0, 0.0, 0), "top_p"),
        (Sample(1.0, 0, 1.1, 0.0, 0), "top_p"),
        (Sample(1.0, 0, 1.0, -0.1, 0), "min_p"),
        (Sample(1.0, 0, 1.0, math.nan, 0), "min_p"),
        (Sample(1.0, 0, 1.0, 0.0, 2**63), "seed"),
    ],
)
def test_sampling_parameters_out_of_range_are_refused(engine: TorchEngine, sample: Sample, problem: str) -> None:
    sequence = engine.create()
    with pytest.raises(ValueError, match=problem):
        engine.step([Work(sequence, 0, (1, 2), sample)])
    assert engine.consumed(sequence) == 0 and engine.check() == []


def test_a_token_outside_the_vocabulary_is_named(engine: TorchEngine) -> None:
    sequence = engine.create()
    with pytest.raises(TokenOutOfRangeError) as raised:
        engine.step([Work(sequence, 0, (1, 2, 96))])
    assert (raised.value.token_id, raised.value.index, raised.value.vocab_size) == (96, 2, 96)


def test_an_empty_sequence_has_no_row_to_sample(engine: TorchEngine) -> None:
    sequence = engine.create()
    assert not engine.can_sample(sequence)
    with pytest.raises(ValueError, match="no row"):
        engine.step([Work(sequence, 0, (), GREEDY)])
    consume(engine, sequence, [1])
    assert engine.can_sample(sequence)


def test_tokens_beyond_the_context_limit_are_refused_and_the_rest_still_fits(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=1, pages=70)
    sequence = engine.create()
    consume(engine, sequence, [3] * 4090)
    before = state_digest(engine, sequence)
    with pytest.raises(ContextFullError):
        engine.step([Work(sequence, 4090, (3,) * 7)])
    assert state_digest(engine, sequence) == before
    engine.step([Work(sequence, 4090, (3,) * 6)])
    assert engine.consumed(sequence) == 4096


def test_too_few_pages_refuse_the_whole_step(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=2, pages=3)
    one, other = engine.create(), engine.create()
    consume(engine, one, [1] * 64)
    with pytest.raises(NodeCapacityError) as raised:
        engine.step([Work(one, 64, (1,)), Work(other, 0, (1,) * 65)])
    assert (raised.value.what, raised.value.needed, raised.value.free) == ("pages", 3, 2)
    assert engine.consumed(one) == 64 and engine.consumed(other) == 0
    assert engine.capacity().pages_free == 2 and engine.check() == []
    engine.step([Work(one, 64, (1,)), Work(other, 0, (1,) * 64)])


def test_a_fork_without_room_takes_nothing(make_engine: MakeEngine) -> None:
    no_slot, no_page = make_engine(slots=1, pages=4), make_engine(slots=2, pages=1)
    for engine, what in ((no_slot, "slots"), (no_page, "pages")):
        sequence = engine.create()
        consume(engine, sequence, [1] * 20)
        before = engine.capacity()
        with pytest.raises(NodeCapacityError, match=what):
            engine.fork(sequence)
        assert engine.capacity() == before and engine.check() == []


def test_a_fork_shares_full_pages_and_copies_the_partial_one(make_engine: MakeEngine) -> None:
    engine = make_engine(slots=3, pages=9)
    sequence = engine.create()
    consume(engine, sequence, [1] * 130)
    children = [engine.fork(sequence), engine.fork(sequence)]
    assert engine.capacity().pages_free == 9 - 2 - 3
    assert [engine.pages_needed(child, 62) for child in children] == [0, 0]
    assert engine.pages_needed(sequence, 63) == 1
    engine.free(sequence)
    assert engine.capacity().pages_free == 9 - 2 - 2
    for child in children:
        engine.free(child)
    assert engine.capacity().pages_free == 9


def test_numbers_out_of_range_name_their_sequence_and_leave_all_as_they_were(make_engine: MakeEngine) -> None:
    """In every residue of the tile: also where the step had closed it for some of the batch."""
    engine, quiet = make_engine(slots=5, pages=40), make_engine(slots=1)
    engine.decoder.embedding[90] = math.nan
    for length in range(46, 65):
        sound, sick, prefilling, empty = (engine.create() for _ in range(4))
        for sequence in (sound, sick, prefilling):
            consume(engine, sequence, [sequence % 90] * length)
        live, free = (sound, sick, prefilling, empty), engine.capacity()
        before = [state_digest(engine, sequence) for sequence in live]
        works = [
            Work(sound, length, (5,), GREEDY),
            Work(sick, length, (90,), GREEDY),
            Work(prefilling, length, (7,) * 70),
            Work(empty, 0, (8,) * 20, GREEDY),
        ]
        with pytest.raises(NonFiniteLogitsError) as raised:
            engine.step(works)
        assert (raised.value.sequence, raised.value.position) == (sick, length + 1)
        assert [engine.consumed(sequence) for sequence in live] == [length] * 3 + [0]
        assert [state_digest(engine, sequence) for sequence in live] == before
        assert engine.capacity() == free and engine.check() == []
        engine.step([work for work in works if work.sequence != sick])
        alone = quiet.create()
        consume(quiet, alone, [prefilling % 90] * length + [7] * 70)
        assert state_digest(engine, prefilling) == state_digest(quiet, alone)
        quiet.free(alone)
        for sequence in live:
            engine.free(sequence)


def test_numbers_out_of_range_are_found_without_sampling_too(engine: TorchEngine) -> None:
    engine.decoder.embedding[90] = math.inf
    sequence = engine.create()
    with pytest.raises(NonFiniteLogitsError):
        engine.step([Work(sequence, 0, (1, 2, 90, 3, 4, 5))])


def test_logits_out_of_range_are_found(engine: TorchEngine) -> None:
    sequence = engine.create()
    consume(engine, sequence, [1, 2])
    engine.decoder.head[17] = math.nan
    with pytest.raises(NonFiniteLogitsError, match="logits at position 2"):
        engine.step([Work(sequence, 2, (), GREEDY)])


def test_a_forward_pass_that_breaks_off_leaves_all_as_they_were(
    engine: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It breaks off late, with most layers' states already moved on."""
    sequences = [engine.create() for _ in range(3)]
    for sequence in sequences:
        consume(engine, sequence, [1] * 60)
    before, free = [state_digest(engine, sequence) for sequence in sequences], engine.capacity()

    def out_of_memory(stream: Stream, step: Step) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(engine.decoder.layers[-1], "forward", out_of_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step([Work(sequence, 60, (1,) * 10) for sequence in sequences])
    assert [state_digest(engine, sequence) for sequence in sequences] == before
    assert engine.capacity() == free and engine.check() == []
    engine.step([Work(sequence, 60, (1,) * 10) for sequence in sequences])
    assert engine.check() == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_state_out_of_range_never_becomes_a_checkpoint(engine: TorchEngine, bad: float) -> None:
    sequence = engine.create()
    consume(engine, sequence, [1] * 40)
    engine.tensors.S[2, engine._sequences[sequence].slot, 1, 3, 3] = bad
    with pytest.raises(NonFiniteStateError) as raised:
        engine.capture(sequence)
    assert raised.value.part == "kda.002.state.1"
    assert engine.check() == []


def test_a_write_to_free_memory_or_beyond_a_sessions_tokens_is_found(engine: TorchEngine) -> None:
    sequence = engine.create()
    decode(engine, sequence, [1] * 20)
    assert engine.check() == []
    live, tensors = engine._sequences[sequence], engine.tensors
    tensors.pages[live.pages[0], 0, 20, 0] = 1.0
    assert engine.check() == [f"sequence {sequence}: a row beyond its 20 tokens was written"]
    tensors.pages[live.pages[0], 0, 20, 0] = math.nan
    free_page, free_slot = engine.pages.free_ids()[0], engine.slots.free_ids()[0]
    tensors.pages[free_page, 0, 0, 0] = 0.0
    tensors.kda_layers[0].opened["v"][free_slot, 0, 0, 0] = 0
    assert engine.check() == [
        f"slots: {free_slot} is free, but its open_v was written",
        f"pages: {free_page} is free, but was written",
    ]


def test_a_shared_partial_page_and_a_missing_page_are_found(engine: TorchEngine) -> None:
    sequence = engine.create()
    consume(engine, sequence, [1] * 20)
    live = engine._sequences[sequence]
    engine.pages.share(live.pages)
    assert any("is shared" in problem for problem in engine.check())
    engine.pages.give_back(live.pages)
    live.pages.append(live.pages[0])
    problems = engine.check()
    assert any("appears twice" in problem for problem in problems)
    assert any("2 pages for 20 tokens" in problem for problem in problems)


@pytest.mark.parametrize("thorough", [False, True])
def test_warming_up_leaves_no_trace(engine: TorchEngine, thorough: bool) -> None:
    before = engine.capacity()
    warm_up(engine, thorough)
    assert engine.capacity() == before and engine.check() == []
