"""TritonStep: one batch on a GPU, planned on the host and copied to the device before the first layer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from forkpoint.kernels.embedding.triton import gather
from forkpoint.kernels.kda.triton import launch as kda
from forkpoint.kernels.kda.triton.plan import PrefillPlan, decode_facts, prefill_plan
from forkpoint.kernels.mla.plan import HostPlan, MlaPlan
from forkpoint.kernels.mla.triton import launch as mla
from forkpoint.limits import PAGE_TOKENS
from forkpoint.model.rows import RowBatch
from forkpoint.model.state import StateTensors

RESIDUAL_DTYPE: Final = torch.float32
"""Of the residual stream; docs/adr/0009 has what bf16 would cost."""


def decode_first(batch: RowBatch) -> tuple[RowBatch, list[int] | None]:
    """The batch with its one-row sequences first, and for each row of the old order where it lies in the new one.

    None where nothing moved. Sequences without rows are left out.
    """
    lengths = [batch.length(n) for n in range(batch.sequences)]
    order = [n for n, length in enumerate(lengths) if length == 1]
    order += [n for n, length in enumerate(lengths) if length > 1]
    firsts = [0] * batch.sequences
    cu_seqlens = [0]
    token_ids: list[int] = []
    for n in order:
        firsts[n] = len(token_ids)
        token_ids += batch.token_ids[batch.cu_seqlens[n] : batch.cu_seqlens[n + 1]]
        cu_seqlens.append(len(token_ids))
    rows = [firsts[n] + row for n, length in enumerate(lengths) for row in range(length)]
    moved = RowBatch(
        token_ids,
        cu_seqlens,
        starts=[batch.starts[n] for n in order],
        slots=[batch.slots[n] for n in order],
        page_tables=[batch.page_tables[n] for n in order],
    )
    return moved, None if rows == list(range(len(rows))) else rows


@dataclass(frozen=True)
class StepPlan:
    """What every layer of one batch reads, on the device."""

    decoding: int
    """Rows of sequences with one row each: the first ones."""
    facts: Tensor
    """[decoding, 2] int32, see decode_facts."""
    prefill: PrefillPlan | None
    mla: MlaPlan | None
    token_ids: Tensor
    """[R] int64."""
    kept_at: Tensor
    """[W] int64: slot * 2 + position % 2 of the final-norm rows to keep."""
    kept_rows: Tensor
    """[W] int64: their rows."""
    rows: Tensor | None
    """[R] int64: the batch's rows in this step's order, None where it is the same."""


@dataclass(frozen=True)
class HostStep:
    """A step planned on the host, before its tables' one copy to the device."""

    decoding: int
    prefill: PrefillPlan | None
    mla: HostPlan | None
    is_moved: bool
    has_whole_chunks: bool
    """Each sequence has one row, or a multiple of a page's rows from a page's first one on."""
    own: list[Tensor]
    """Facts, tiles, sequences, token ids, places and rows of what is kept, order."""

    @staticmethod
    def of(batch: RowBatch, attention: tuple[int, int, int] | None) -> "HostStep":
        """Plans a batch; `attention`: what the MLA layers ask for (mla.works_of), None where there are none."""
        moved, rows = decode_first(batch)
        host = torch.device("cpu")
        bounds = moved.cu_seqlens
        decoding = sum(last - first == 1 for first, last in pairwise(bounds))
        facts = decode_facts(moved.slots[:decoding], moved.starts[:decoding], host)
        longer = prefill_plan(
            moved.slots[decoding:], [bound - decoding for bound in bounds[decoding:]], moved.starts[decoding:], host
        )
        kept = moved.kept_rows()
        indices = [
            torch.tensor(values, dtype=torch.int64)
            for values in (moved.token_ids, [2 * k[0] + k[1] for k in kept], [k[2] for k in kept], rows or [])
        ]
        return HostStep(
            decoding=decoding,
            prefill=longer if moved.rows > decoding else None,
            mla=HostPlan.of(moved.page_tables, bounds, moved.starts, [attention]) if attention else None,
            is_moved=rows is not None,
            has_whole_chunks=moved.rows > 0
            and not any(
                start % PAGE_TOKENS or (last - first) % PAGE_TOKENS
                for start, (first, last) in zip(moved.starts[decoding:], pairwise(bounds[decoding:]), strict=True)
            ),
            own=[facts, longer.tiles, longer.sequences, *indices],
        )

    @property
    def may_recur(self) -> bool:
        """Whether its shapes are likely to come again: each sequence decodes, or is at a whole chunk of its prompt; and
        attention takes one launch."""
        return self.has_whole_chunks and (self.mla is None or self.mla.launches == 1)

    def padded(self) -> "HostStep":
        """The same step with tables of fewer different shapes, if it may recur."""
        return self if self.mla is None else replace(self, mla=self.mla.padded())

    def tables(self) -> list[Tensor]:
        """All that goes to the device."""
        return self.own + (self.mla.parts() if self.mla else [])

    def there(self, tables: Sequence[Tensor]) -> StepPlan:
        """The plan whose `tables` are on the device."""
        facts, tiles, sequences, token_ids, kept_at, kept_rows, order, *attention = tables
        return StepPlan(
            decoding=self.decoding,
            facts=facts,
            prefill=replace(self.prefill, tiles=tiles, sequences=sequences) if self.prefill else None,
            mla=self.mla.there(attention) if self.mla else None,
            token_ids=token_ids,
            kept_at=kept_at,
            kept_rows=kept_rows,
            rows=order if self.is_moved else None,
        )


class TritonStep:
    """A batch under way. Its rows: one-row sequences first, so that each KDA kernel finds its own side by side."""

    def __init__(self, plan: StepPlan, tensors: StateTensors) -> None:
        self.plan, self._tensors = plan, tensors

    def embed(self, table: Tensor) -> Tensor:
        return gather(self.plan.token_ids, table, RESIDUAL_DTYPE)

    def kda(self, x: Tensor, z: Tensor, b: Tensor, weights: kda.KdaWeights, layer: int) -> Tensor:
        # What a sequence gets is the same from either kernel.
        views, plan, cut = self._tensors.kda_layers[layer], self.plan, self.plan.decoding
        state = kda.KdaState(views.S, kda.OpenFactors(**views.opened), views.conv_ring, views.conv_grid)
        if plan.prefill is None:
            return kda.decode(x, z, b, weights, state, plan.facts)
        if not cut:
            return kda.prefill(x, z, b, weights, state, plan.prefill)
        decoded = kda.decode(x[:cut], z[:cut], b[:cut], weights, state, plan.facts)
        return torch.cat([decoded, kda.prefill(x[cut:], z[cut:], b[cut:], weights, state, plan.prefill)])

    def attend(self, q: Tensor, latents: Tensor, rank: int, scale: float, layer: int) -> Tensor:
        pages, plan = self._tensors.layer_pages[layer], self.plan.mla
        if plan is None:
            raise ValueError("the step was planned for a model without MLA layers")
        mla.write_latents(latents, pages, plan)
        return mla.paged_mla(q, pages, plan, rank, scale)

    def finish(self, rows: Tensor) -> Tensor:
        plan, kept = self.plan, self._tensors.norm_rows
        kept.view(-1, kept.shape[-1]).index_copy_(0, plan.kept_at, rows.index_select(0, plan.kept_rows))
        return rows if plan.rows is None else rows.index_select(0, plan.rows)
