"""Small drivers of a decoder for tests: sequences in slots, with pages dealt out of order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forkpoint.limits import PAGE_TOKENS
from forkpoint.model.config import ModelConfig
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.kernels import Kernels
from forkpoint.model.rows import RowBatch
from forkpoint.model.staging import StateStaging
from forkpoint.model.state import StateLayout, StateTensors

FP32_TOLERANCE = 2e-5
BF16_TOLERANCE = 0.05


@dataclass
class Lane:
    """One session's tokens so far, its slot and its pages."""

    slot: int
    page_table: list[int]
    consumed: int = 0
    rows: list[Tensor] = field(default_factory=list)


class ModelRun:
    """A decoder with poisoned slots and pages for a few sequences of at most `tokens` tokens each."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        device: torch.device | str = "cpu",
        slots: int = 4,
        tokens: int = 512,
        kernels: Kernels | None = None,
    ) -> None:
        self.decoder = HybridDecoder(config, weights, device, kernels)
        self.layout = StateLayout(config, self.decoder.kernels.dtypes)
        pages = -(-tokens // PAGE_TOKENS)
        self.tensors = StateTensors.allocate(self.layout, slots, slots * pages, device)
        self.staging = StateStaging(self.tensors, self.decoder.kernels)
        order = torch.randperm(slots * pages, generator=torch.Generator().manual_seed(1)).tolist()
        self.sequences = [Lane(slot, order[slot * pages : (slot + 1) * pages]) for slot in range(slots)]
        for slot in range(slots):
            self.tensors.reset_slot(slot)

    def consume(self, work: Sequence[tuple[int, Sequence[int]]]) -> Tensor:
        """One forward pass over (slot, token ids) pairs; returns the logits of every row [R, vocab]."""
        cu_seqlens, token_ids = [0], list[int]()
        chosen = [self.sequences[slot] for slot, _ in work]
        for _, ids in work:
            token_ids += ids
            cu_seqlens.append(len(token_ids))
        batch = RowBatch(
            token_ids,
            cu_seqlens,
            [sequence.consumed for sequence in chosen],
            [sequence.slot for sequence in chosen],
            [sequence.page_table for sequence in chosen],
        )
        rows = self.decoder.forward(batch, self.tensors)
        for sequence, (_, ids), first in zip(chosen, work, cu_seqlens, strict=False):
            sequence.consumed += len(ids)
            sequence.rows.append(rows[first : first + len(ids)])
        return self.decoder.logits(rows)

    def cut(self, slot: int, ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Consume `ids` in pieces of the given lengths (the last takes the rest); returns all logits [T, vocab]."""
        logits, first = [], 0
        for length in [*lengths, len(ids) - sum(lengths)]:
            if length:
                logits.append(self.consume([(slot, ids[first : first + length])]))
            first += length
        return torch.cat(logits)

    def parts(self, slot: int) -> dict[str, bytes]:
        """The bytes of every checkpoint part at the last grid point."""
        sequence = self.sequences[slot]
        position = sequence.consumed // 16 * 16
        parts = self.staging.read(position, slot, sequence.page_table)
        return {spec.name: data.numpy().tobytes() for spec, data in parts}

    def restore(self, slot: int, position: int, parts: dict[str, bytes]) -> None:
        """Poison the slot and its pages, then put the parts of the checkpoint at `position` in place."""
        sequence = self.sequences[slot]
        self.tensors.poison_slot(slot)
        for page in sequence.page_table:
            self.tensors.poison_page(page)
        buffer = self.staging.host_buffer()
        for spec in self.layout.parts(position):
            self.staging.write(spec, parts[spec.name], buffer, sequence.page_table)
        self.staging.finish(buffer, slot)
        self.tensors.finish_restore(slot, position)
        sequence.consumed = position


def logits_tolerance(device: torch.device) -> float:
    """Largest error of a logit, relative to the largest logit: fp32 on a CPU; rows of bf16 on a GPU."""
    return BF16_TOLERANCE if device.type == "cuda" else FP32_TOLERANCE


def random_ids(config: ModelConfig, count: int, seed: int = 0) -> list[int]:
    """Uniform token ids."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (count,), generator=generator).tolist()
