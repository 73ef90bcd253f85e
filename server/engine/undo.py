"""StepUndo: puts the sequences of a failed step back to where they were."""

from collections.abc import Sequence

import torch
from torch import Tensor

from forkpoint.limits import PAGE_TOKENS, TILE_TOKENS
from forkpoint.model.state import StateTensors
from forkpoint.server.engine.batch import Work
from forkpoint.server.engine.pools import Pool
from forkpoint.server.engine.sequences import LiveSequence, pages_for


def slot_views(tensors: StateTensors, slot: int) -> dict[str, Tensor]:
    """Views of everything that a slot holds, by the layout's names."""
    return {name: getattr(tensors, name).select(tensors.slot_axis(name), slot) for name in tensors.layout.slot_tensors}


class StepUndo:
    """What a step overwrites, copied before it runs. One object serves one step.

    A single token inside a tile needs few copies (`StateLayout.overwritten`): its row, latent and conv input are
    addressed by position, and the next attempt overwrites them; all such sequences are copied together. Who closes a
    tile or consumes more has its slot copied, about once in sixteen decoded tokens. So a step needs, for a moment,
    memory for as many slots again.
    """

    def __init__(self, tensors: StateTensors, works: Sequence[Work], sequences: Sequence[LiveSequence]) -> None:
        self._tensors, self._sequences = tensors, tuple(sequences)
        inside: list[int] = []
        self._whole: list[tuple[int, dict[str, Tensor]]] = []
        for work, sequence in zip(works, sequences, strict=True):
            if len(work.token_ids) == 1 and (work.start + 1) % TILE_TOKENS:
                inside.append(sequence.slot)
            elif work.token_ids:
                views = slot_views(tensors, sequence.slot)
                self._whole.append((sequence.slot, {name: view.clone() for name, view in views.items()}))
        self._inside = torch.tensor(inside, dtype=torch.int64).to(tensors.device)
        names = tensors.layout.overwritten if inside else ()
        self._saved = {
            name: getattr(tensors, name).index_select(tensors.slot_axis(name), self._inside) for name in names
        }

    def undo(self, works: Sequence[Work], pages: Pool) -> None:
        """Put back slots, positions and pages; what the step wrote into pages is poisoned again."""
        for slot, saved in self._whole:
            views = slot_views(self._tensors, slot)
            for name, copy in saved.items():
                views[name].copy_(copy)
        for name, copies in self._saved.items():
            getattr(self._tensors, name).index_copy_(self._tensors.slot_axis(name), self._inside, copies)
        for work, sequence in zip(works, self._sequences, strict=True):
            sequence.consumed = work.start
            kept = pages_for(work.start)
            freed = pages.give_back(sequence.pages[kept:])
            del sequence.pages[kept:]
            if self._tensors.poison:
                for page in freed:
                    self._tensors.poison_page(page)
                if work.token_ids and work.start % PAGE_TOKENS:
                    self._tensors.pages[sequence.pages[-1], :, work.start % PAGE_TOKENS :].fill_(float("nan"))
