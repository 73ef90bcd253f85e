"""audit: every inconsistency between the pools, the sequences that hold their pieces, and the poison in free memory."""

from collections.abc import Collection

import torch
from torch import Tensor

from forkpoint.limits import PAGE_TOKENS
from forkpoint.model.state import POISON_INT32, StateTensors
from forkpoint.server.engine.pools import Pool
from forkpoint.server.engine.sequences import LiveSequence, pages_for
from forkpoint.server.engine.undo import slot_views


def audit(slots: Pool, pages: Pool, tensors: StateTensors, sequences: Collection[LiveSequence]) -> list[str]:
    """Problems in words; empty when sound. Reads all free memory when it is poisoned."""
    problems = slots.check([sequence.slot for sequence in sequences])
    problems += pages.check([page for sequence in sequences for page in sequence.pages])
    for sequence in sequences:
        problems += _sequence_problems(pages, sequence)
    if tensors.poison and not problems:
        problems += _poison_problems(slots, pages, tensors, sequences)
    return problems


def _sequence_problems(pages: Pool, sequence: LiveSequence) -> list[str]:
    name, problems = f"sequence {sequence.handle}", []
    if len(set(sequence.pages)) != len(sequence.pages):
        problems.append(f"{name}: a page appears twice")
    if len(sequence.pages) != pages_for(sequence.consumed):
        problems.append(f"{name}: {len(sequence.pages)} pages for {sequence.consumed} tokens")
    elif sequence.consumed % PAGE_TOKENS and pages.holders(sequence.pages[-1]) != 1:
        problems.append(f"{name}: its partial page {sequence.pages[-1]} is shared")
    return problems


def _poison_problems(slots: Pool, pages: Pool, tensors: StateTensors, sequences: Collection[LiveSequence]) -> list[str]:
    """Free memory, and the rows of pages beyond what was consumed, that somebody wrote."""
    problems: list[str] = []
    for slot in slots.free_ids():
        written = [name for name, view in slot_views(tensors, slot).items() if not _is_poison(view)]
        problems += [f"slots: {slot} is free, but its {name} was written" for name in written]
    touched = [page for page in pages.free_ids() if not _is_poison(tensors.pages[page])]
    problems += [f"pages: {page} is free, but was written" for page in touched]
    for sequence in sequences:
        rows = sequence.consumed % PAGE_TOKENS
        if rows and not _is_poison(tensors.pages[sequence.pages[-1], :, rows:]):
            problems.append(f"sequence {sequence.handle}: a row beyond its {sequence.consumed} tokens was written")
    return problems


def _is_poison(tensor: Tensor) -> bool:
    poisoned = torch.isnan(tensor) if tensor.is_floating_point() else tensor == POISON_INT32
    return bool(poisoned.all())
