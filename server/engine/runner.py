"""TorchEngine: the engine port over HybridDecoder and StateTensors."""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from forkpoint.errors import NodeCapacityError, StateIncompatibleError
from forkpoint.limits import NORM_ROWS, PAGE_TOKENS
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.rows import RowBatch
from forkpoint.model.staging import StateStaging
from forkpoint.model.state import StateTensors
from forkpoint.parts import PartSpec
from forkpoint.server.engine.audit import audit
from forkpoint.server.engine.base import Capacity, Capture, ModelFacts
from forkpoint.server.engine.batch import Sampled, Work
from forkpoint.server.engine.capture import SABOTAGES, capture, check_part, flip_a_sign
from forkpoint.server.engine.errors import NonFiniteLogitsError
from forkpoint.server.engine.pools import Pool
from forkpoint.server.engine.sampler import sample_tokens
from forkpoint.server.engine.sequences import LiveSequence, pages_for
from forkpoint.server.engine.undo import StepUndo
from forkpoint.server.engine.works import check_works


class TorchEngine:
    """Runs one model on one device; the contract is `forkpoint.server.engine.base.Engine`.

    `tensors` fixes the pool sizes. `sabotage` damages restores on purpose (see SABOTAGES): it shows that a comparison
    of states can fail.
    """

    def __init__(
        self, facts: ModelFacts, decoder: HybridDecoder, tensors: StateTensors, sabotage: str | None = None
    ) -> None:
        if sabotage is not None and sabotage not in SABOTAGES:
            raise ValueError(f"unknown sabotage {sabotage!r}, expected one of {SABOTAGES}")
        self._facts, self.decoder, self.tensors, self._sabotage = facts, decoder, tensors, sabotage
        self.slots = Pool("slots", tensors.slots)
        self.pages = Pool("pages", tensors.page_count)
        self._staging = StateStaging(tensors, decoder.kernels)
        self._sequences: dict[int, LiveSequence] = {}
        self._next_handle = 1
        self._sabotaged: set[int] = set()

    @property
    def facts(self) -> ModelFacts:
        """Identity of the model."""
        return self._facts

    def create(self) -> int:
        """A new, empty sequence. Raises NodeCapacityError."""
        return self._add(self._take_slot(), [], 0).handle

    def fork(self, sequence: int) -> int:
        """Copy slot and partial page, share full pages. Raises NodeCapacityError."""
        parent = self._sequences[sequence]
        parent.require_ready()
        full = parent.pages[: parent.consumed // PAGE_TOKENS]
        partial = parent.pages[len(full) :]
        if self.slots.free < 1:
            raise NodeCapacityError(self.slots.name, 1, 0)
        copies = self.pages.take(len(partial))
        slot = self._take_slot()
        self.pages.share(full)
        self.tensors.copy_slot(parent.slot, slot)
        for source, target in zip(partial, copies, strict=True):
            self.tensors.copy_page(source, target)
        child = self._add(slot, full + copies, parent.consumed)
        child.rows_from = parent.rows_from
        return child.handle

    def free(self, sequence: int) -> None:
        """Give back slot and pages, poisoned, so that a stale read shows."""
        gone = self._sequences.pop(sequence)
        self._sabotaged.discard(sequence)
        for slot in self.slots.give_back([gone.slot]):
            if self.tensors.poison:
                self.tensors.poison_slot(slot)
        for page in self.pages.give_back(gone.pages):
            if self.tensors.poison:
                self.tensors.poison_page(page)

    def consumed(self, sequence: int) -> int:
        """Tokens consumed so far."""
        return self._sequences[sequence].consumed

    def can_sample(self, sequence: int) -> bool:
        """Whether the final-norm row of the last consumed position is there."""
        return self._sequences[sequence].can_sample

    def pages_needed(self, sequence: int, token_count: int) -> int:
        """Free pages that consuming `token_count` more tokens would take."""
        return self._sequences[sequence].pages_needed(token_count)

    def step(self, works: Sequence[Work]) -> list[Sampled | None]:
        """Consume every work's tokens in one forward pass, then sample where asked.

        Whatever is raised, every sequence is as it was. Beside the port's errors: NonFiniteLogitsError, naming the
        sequence without which the step can be tried again; and what the forward pass raises, out of memory for one.
        """
        if not works:
            return []
        sequences = [self._sequences[work.sequence] for work in works]
        check_works(works, sequences, self._facts.vocab_size, self._facts.context_limit)
        undo = StepUndo(self.tensors, works, sequences)
        self._extend(works, sequences)
        try:
            self._consume(works, sequences)
            return self._sample(works, sequences)
        except BaseException:
            undo.undo(works, self.pages)
            raise

    def capture(self, sequence: int, known: Collection[str] = ()) -> Capture:
        """Copy the state at the sequence's last grid point, without full pages that are `known`. Raises
        NonFiniteStateError."""
        live = self._sequences[sequence]
        live.require_ready()
        return capture(self._staging, live, self.tensors.layout, known)

    def parts(self, grid_position: int) -> tuple[PartSpec, ...]:
        """The parts of a checkpoint at a grid position, in layer order. Raises ValueError off the grid."""
        return self.tensors.layout.parts(grid_position)

    def settled_parts(self, grid_position: int) -> tuple[str, ...]:
        """Names of the full pages at a grid position. Raises ValueError off the grid."""
        return self.tensors.layout.settled_parts(grid_position)

    def begin_restore(self, grid_position: int) -> int:
        """A new sequence whose parts are to be loaded. Raises NodeCapacityError, ValueError off the grid."""
        expected = {spec.name: spec for spec in self.parts(grid_position)}
        if self.slots.free < 1:
            raise NodeCapacityError(self.slots.name, 1, 0)
        staged = self._staging.host_buffer()
        pages = self.pages.take(pages_for(grid_position))
        sequence = self._add(self._take_slot(), pages, grid_position)
        sequence.rows_from, sequence.staged = grid_position, staged
        sequence.expected, sequence.missing = expected, set(expected)
        return sequence.handle

    def load_part(self, sequence: int, spec: PartSpec, data: bytes | bytearray | memoryview) -> None:
        """Fill one part. Raises StateIncompatibleError, ValueError for a sequence that is not being restored."""
        live = self._sequences[sequence]
        if live.expected is None or live.staged is None:
            raise ValueError(f"sequence {sequence} is not being restored")
        check_part(live.expected, spec, data)
        if self._sabotage == "conv-tail" and ".conv." in spec.name and sequence not in self._sabotaged:
            damaged = flip_a_sign(spec, data)
            if damaged != data:
                self._sabotaged.add(sequence)
            data = damaged
        self._staging.write(spec, data, live.staged, live.pages)
        live.missing.discard(spec.name)

    def end_restore(self, sequence: int) -> None:
        """Make the sequence ready. Raises StateIncompatibleError naming missing parts."""
        live = self._sequences[sequence]
        if live.expected is None or live.staged is None:
            raise ValueError(f"sequence {sequence} is not being restored")
        if live.missing:
            names = ", ".join(sorted(live.missing))
            raise StateIncompatibleError(f"parts {names}", "none of them", f"a layout of {len(live.expected)} parts")
        self._staging.finish(live.staged, live.slot)
        self.tensors.finish_restore(live.slot, live.consumed)
        live.expected = live.staged = None

    def capacity(self) -> Capacity:
        """Pool sizes now."""
        layout = self.tensors.layout
        return Capacity(
            slots_total=self.slots.size,
            slots_free=self.slots.free,
            pages_total=self.pages.size,
            pages_free=self.pages.free,
            slot_bytes=layout.slot_bytes(),
            page_bytes=layout.page_bytes(),
        )

    def check(self) -> list[str]:
        """Every inconsistency of pools and poison; empty when sound. Reads all free memory."""
        return audit(self.slots, self.pages, self.tensors, self._sequences.values())

    def _take_slot(self) -> int:
        (slot,) = self.slots.take(1)
        self.tensors.reset_slot(slot)
        return slot

    def _add(self, slot: int, pages: list[int], consumed: int) -> LiveSequence:
        sequence = LiveSequence(self._next_handle, slot, pages, consumed)
        self._next_handle += 1
        self._sequences[sequence.handle] = sequence
        return sequence

    def _extend(self, works: Sequence[Work], sequences: Sequence[LiveSequence]) -> None:
        """Take the pages that the step writes, all or none."""
        counts = [s.pages_needed(len(w.token_ids)) for w, s in zip(works, sequences, strict=True)]
        fresh = self.pages.take(sum(counts))
        for sequence, count in zip(sequences, counts, strict=True):
            sequence.pages += fresh[:count]
            del fresh[:count]

    def _consume(self, works: Sequence[Work], sequences: Sequence[LiveSequence]) -> None:
        """Run the works' tokens through the model and check where each sequence ends."""
        consuming = [(w, s) for w, s in zip(works, sequences, strict=True) if w.token_ids]
        if consuming:
            self.decoder.forward(_row_batch(consuming), self.tensors)
            for work, sequence in consuming:
                sequence.consumed += len(work.token_ids)
        self._require_finite(sequences, self._last_rows(sequences), "the final-norm row")

    def _last_rows(self, sequences: Sequence[LiveSequence]) -> Tensor:
        """Stored final-norm rows [B, hidden] of the sequences' last consumed positions.

        Always from the slot, also for rows of this step, so that sampling now or later reads the same bits.
        """
        places = [sequence.slot * NORM_ROWS + (sequence.consumed - 1) % NORM_ROWS for sequence in sequences]
        kept = self.tensors.norm_rows.flatten(0, 1)
        return kept.index_select(0, torch.tensor(places, dtype=torch.int64).to(kept.device))

    def _require_finite(self, sequences: Sequence[LiveSequence], rows: Tensor, what: str) -> None:
        for sequence, finite in zip(sequences, torch.isfinite(rows).all(dim=1).tolist(), strict=True):
            if not finite:
                raise NonFiniteLogitsError(sequence.handle, sequence.consumed, what)

    def _sample(self, works: Sequence[Work], sequences: Sequence[LiveSequence]) -> list[Sampled | None]:
        asking = [(w.sample, s) for w, s in zip(works, sequences, strict=True) if w.sample is not None]
        if not asking:
            return [None] * len(works)
        chosen = [sequence for _, sequence in asking]
        logits = self.decoder.logits(self._last_rows(chosen))
        self._require_finite(chosen, logits, "logits")
        positions = [sequence.consumed for sequence in chosen]
        tokens = iter(sample_tokens(self.decoder.kernels, logits, [wanted for wanted, _ in asking], positions))
        return [None if work.sample is None else next(tokens) for work in works]


def _row_batch(consuming: Sequence[tuple[Work, LiveSequence]]) -> RowBatch:
    token_ids: list[int] = []
    cu_seqlens = [0]
    for work, _ in consuming:
        token_ids += work.token_ids
        cu_seqlens.append(len(token_ids))
    return RowBatch(
        token_ids=token_ids,
        cu_seqlens=cu_seqlens,
        starts=[work.start for work, _ in consuming],
        slots=[sequence.slot for _, sequence in consuming],
        page_tables=[sequence.pages for _, sequence in consuming],
    )
