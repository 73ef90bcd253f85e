"""The state does not depend on what else is in the batch, on slots and pages, nor on what they held before."""

import random
import threading

import pytest
import torch

from forkpoint.model.rows import RowBatch
from tests.support.engines import state_digest
from tests.support.lab import Model


def test_a_decoding_session_is_untouched_by_any_number_of_other_rows(model: Model) -> None:
    """Row counts pass through every remainder of the 16-row blocks of a product."""
    lab = model.lab()
    sequence, other = lab.run(lab.create(), 20), lab.create(model.stream(1))
    for count in [*range(1, 34), 127]:
        lab.step(*random.Random(count).sample([(sequence, 1), (other, count)], 2))
    lab.check_state(sequence, other)


@pytest.mark.parametrize("crowd", [1, 2, 7, 15, 16, 40])
def test_sessions_decode_together_as_they_do_alone(model: Model, crowd: int) -> None:
    lab = model.lab(slots=crowd, pages=4 * crowd)
    sequences = [lab.create(model.stream(n % 5)) for n in range(crowd)]
    lab.step(*((sequence, 3 * n + 1) for n, sequence in enumerate(sequences)))
    for _ in range(18):
        lab.step(*((sequence, 1) for sequence in sequences))
    lab.check_state(*sequences)


def test_the_order_of_a_batch_changes_nothing(model: Model, rng: random.Random) -> None:
    lab = model.lab()
    sequences = [lab.create(model.stream(n)) for n in range(6)]
    for _ in range(25):
        shares = [(sequence, rng.choice([1, 1, 2, 5, 16, 17])) for sequence in sequences]
        lab.step(*rng.sample(shares, rng.randint(1, 6)))
    lab.check_state(*sequences)


def test_prefill_beside_decode_changes_neither(model: Model) -> None:
    lab = model.lab()
    decoding, prefilling = lab.run(lab.create(), 100), lab.create(model.stream(1))
    for chunk in (512, 1, 63, 64, 300):
        lab.step((decoding, 1), (prefilling, chunk))
        lab.check_state(decoding, prefilling)


def test_a_freed_slot_and_its_pages_start_afresh(model: Model) -> None:
    lab = model.lab(slots=1, pages=3)
    for length in (190, 1, 16, 65, 129):
        sequence = lab.run(lab.create(), length, 1)
        lab.check_state(sequence)
        lab.free(sequence)
        assert lab.engine.check() == []


def test_memory_that_others_gave_back_is_taken_while_they_decode(model: Model) -> None:
    lab = model.lab(slots=3, pages=9)
    staying, leaving = lab.run(lab.create(), 30), lab.run(lab.create(model.stream(1)), 100)
    for name in range(2, 6):
        lab.step((staying, 1), (leaving, 1))
        lab.free(leaving)
        leaving = lab.create(model.stream(name))
        lab.step((leaving, 33 * name), (staying, 1))
        lab.check_state(staying, leaving)


def test_entries_without_rows_pad_a_batch_and_leave_their_slots_alone(model: Model) -> None:
    """A batch padded to a fixed size: three sequences of eight entries have rows."""
    lab = model.lab()
    sequences = [lab.run(lab.create(model.stream(n)), 20 + 9 * n) for n in range(8)]
    before = [state_digest(lab.engine, sequence) for sequence in sequences]
    live = [lab.engine._sequences[sequence] for sequence in sequences]
    token_ids: list[int] = []
    borders = [0]
    for n, sequence in enumerate(live):
        if n in (1, 4, 6):
            token_ids += model.stream(n).token_ids[sequence.consumed : sequence.consumed + 2]
        borders.append(len(token_ids))
    spare = lab.engine.pages.free_ids()
    batch = RowBatch(
        token_ids,
        borders,
        starts=[sequence.consumed for sequence in live],
        slots=[sequence.slot for sequence in live],
        page_tables=[[*sequence.pages, page] for sequence, page in zip(live, spare, strict=False)],
    )
    rows = lab.decoder.forward(batch, lab.engine.tensors)
    for n, start in enumerate(batch.starts):
        if n in (1, 4, 6):
            assert torch.equal(rows[borders[n] : borders[n + 1]], model.stream(n).rows[start : start + 2])
        else:
            assert state_digest(lab.engine, sequences[n]) == before[n]


def test_another_thread_computes_the_same_bits(model: Model) -> None:
    """A server's engine runs on a thread of its own."""
    lab = model.lab()
    sequence = lab.create()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            lab.run(sequence, 300, 1, 1, 16)
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
    lab.check_state(sequence)


def test_logits_of_a_row_do_not_depend_on_the_rows_beside_it(model: Model) -> None:
    stream, decoder = model.stream(), model.lab().decoder
    for count in (1, 2, 15, 16, 17, 40):
        assert torch.equal(decoder.logits(stream.rows[100 : 100 + count]), stream.logits[100 : 100 + count])


def test_sessions_packed_at_the_published_head_size_equal_sessions_alone(wide_model: Model, rng: random.Random) -> None:
    lab = wide_model.lab()
    sequences = [lab.create(wide_model.stream(n)) for n in range(5)]
    for _ in range(12):
        shares = [(sequence, rng.choice([1, 1, 3, 16, 40])) for sequence in sequences]
        lab.step(*rng.sample(shares, rng.randint(1, 5)))
    lab.check_state(*sequences)
