"""Paged attention in Triton: a row's bits are a function of its query and its keys, however the batch is cut."""

import math
import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.mla import naive
from forkpoint.kernels.mla import triton as mla
from forkpoint.kernels.mla.work import plan
from forkpoint.limits import PAGE_TOKENS
from tests.support.kernels import relative_rmse
from tests.support.triton_shim import DEVICE

R, DR = 32, 16
SCALE = 1 / math.sqrt(R + DR)
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])


@dataclass
class Sequence:
    """Queries [T, Hq, D] and latents [T, D] of one sequence, and its scattered pages."""

    q: Tensor
    latents: Tensor
    table: list[int]


@dataclass
class Pool:
    """Poisoned pages, and sequences written into them."""

    pages: Tensor
    sequences: list[Sequence]


def pool(lengths: list[int], heads: int, dtype: torch.dtype, queries: int = 1 << 20, seed: int = 0) -> Pool:
    """Sequences of the given lengths in pages of NaN, in mixed order; the pages lie in a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    ids = list(range(sum(counts) + 3))
    random.Random(seed).shuffle(ids)
    room = torch.full((len(ids), 2, PAGE_TOKENS, R + DR), torch.nan, dtype=dtype, device=DEVICE)
    made = Pool(room[:, 1], [])
    for length, count in zip(lengths, counts, strict=True):
        table, ids = ids[:count], ids[count:]
        q = torch.randn(length, heads, R + DR, generator=generator) * 3
        latents = torch.randn(length, R + DR, generator=generator).to(DEVICE, dtype)
        mla.write_latents(latents, made.pages, [table], [0, length], [0])
        made.sequences.append(Sequence(q.to(DEVICE, dtype), latents, table))
    return made


def attend(
    made: Pool, spans: list[tuple[int, int, int]], shape: mla.Shape | None = None, workspace: int = 1 << 28
) -> Tensor:
    """Attention of rows first:last of each named sequence, packed in the given order."""
    rows = [made.sequences[n].q[first:last] for n, first, last in spans]
    cu_seqlens = [0]
    for _, first, last in spans:
        cu_seqlens.append(cu_seqlens[-1] + last - first)
    tables = [made.sequences[n].table for n, _, _ in spans]
    starts = [first for _, first, _ in spans]
    return mla.paged_mla(
        torch.cat(rows), made.pages, tables, R, SCALE, cu_seqlens, starts, shape=shape, workspace=workspace
    )


def exact(sequence: Sequence, position: int) -> Tensor:
    """The attention of one row in fp64: [Hq, R]."""
    keys = sequence.latents[: position + 1].double()
    weights = torch.softmax(sequence.q[position].double() @ keys.T * SCALE, dim=1)
    return weights @ keys[:, :R]


@DTYPES
@pytest.mark.parametrize("heads", [4, 32, 96])
def test_rows_are_the_definition_at_lengths_around_pages_and_splits(heads: int, dtype: torch.dtype) -> None:
    lengths = [1, 63, 64, 65] if heads != 4 else [1, 63, 64, 65, 511, 512, 513]
    made = pool(lengths, heads, dtype)
    ours = attend(made, [(n, length - 1, length) for n, length in enumerate(lengths)])
    reference = torch.stack([exact(s, length - 1) for s, length in zip(made.sequences, lengths, strict=True)])
    assert ours.isfinite().all()
    assert relative_rmse(ours, reference) < (5e-6 if dtype == FP32 else 4e-3)


def test_a_prompt_is_what_the_naive_twin_makes_of_it() -> None:
    made = pool([90], 4, FP32)
    (sequence,) = made.sequences
    ours = attend(made, [(0, 0, 90)])
    twin = naive.paged_mla(sequence.q.cpu(), made.pages.cpu(), [sequence.table], R, SCALE, [0, 90], [0])
    torch.testing.assert_close(ours.cpu(), twin, rtol=1e-4, atol=1e-5)


@DTYPES
def test_a_prompt_cut_anywhere_has_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    made = pool([520], 4, dtype)
    first = 500
    whole = attend(made, [(0, first, 520)])
    for cuts in ([first, 511, 512, 513, 520], [first, 507, 519, 520]):
        parts = [attend(made, [(0, a, b)]) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("heads", [4, 32, 96])
def test_a_row_alone_has_its_bits_in_any_batch_and_any_block(heads: int) -> None:
    made = pool([66, 1, 130, 20], heads, BF16)
    spans = [(2, 127, 130), (0, 63, 65), (1, 0, 1), (3, 20, 20), (3, 18, 20)]
    if heads == 96:
        spans = [(0, 64, 66), (1, 0, 1)]
    together = attend(made, spans)
    alone = torch.cat([attend(made, [(n, t, t + 1)]) for n, a, b in spans for t in range(a, b)])
    assert torch.equal(together, alone)
    for shape in {shape.rows: shape for shape in mla.SHAPES}.values():
        assert torch.equal(attend(made, spans[:1], shape), together[: spans[0][2] - spans[0][1]])


def test_a_small_workspace_takes_more_launches_and_gives_the_same_bits() -> None:
    made = pool([520, 70], 4, BF16)
    spans = [(0, 510, 520), (1, 60, 70)]
    assert torch.equal(attend(made, spans, workspace=1), attend(made, spans))


def test_one_split_and_many_fold_alike() -> None:
    """Keys before 512 that weigh nothing must leave exactly what a sequence without them has, up to one rounding."""
    made = pool([513], 4, FP32)
    (sequence,) = made.sequences
    row = attend(made, [(0, 512, 513)])[0]
    assert relative_rmse(row, exact(sequence, 512)) < 5e-6


def test_poison_beyond_a_sequence_and_in_other_pages_is_never_read() -> None:
    made = pool([70, 10], 4, BF16)
    spans = [(0, 66, 70), (1, 9, 10)]
    before = attend(made, spans)
    used = {(s.table[t // 64], t % 64) for s, n in zip(made.sequences, (70, 10), strict=True) for t in range(n)}
    for page in range(made.pages.shape[0]):
        for row in range(PAGE_TOKENS):
            if (page, row) not in used:
                assert made.pages[page, row].isnan().all()
                made.pages[page, row] = torch.inf
    assert torch.equal(attend(made, spans), before)


def test_latents_go_to_their_places_and_nowhere_else() -> None:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(7, R + DR, generator=generator).to(DEVICE)
    for dtype in (BF16, FP32):
        ours = torch.full((4, 2, PAGE_TOKENS, R + DR), -7.0, dtype=dtype, device=DEVICE)
        twin = ours.clone()
        arguments = [[3], [0, 2]], [0, 2, 7], [5, 62]
        mla.write_latents(latents, ours[:, 0], *arguments)
        naive.write_latents(latents.to(dtype), twin[:, 0], *arguments)
        assert torch.equal(ours, twin)


def test_a_batch_without_rows_is_empty() -> None:
    made = pool([5], 4, BF16)
    assert attend(made, [(0, 5, 5)]).shape == (0, 4, R)


def test_a_plan_covers_every_block_and_split_once() -> None:
    made = plan(((0,) * 20, (0,) * 2, ()), (0, 100, 101, 101), (1150, 64, 9), 96, 64, 100, torch.device("cpu"))
    items = torch.cat([work.items for work in made.launches]).tolist()
    assert len(items) == len({tuple(item) for item in items})
    assert max(work.items.shape[0] for work in made.launches) <= 100 == made.items_max or made.items_max < 100
    splits = [(sequence, number, count) for w in made.launches for sequence, number, _, count in w.blocks.tolist()]
    assert [n for s, n, _ in splits if s == 0] == list(range(150))
    assert {c for s, _, c in splits if s == 0} == {3}
    assert [(n, c) for s, n, c in splits if s == 1] == [(0, 1), (1, 1)]
    with pytest.raises(ValueError, match="needs 2 pages"):
        plan(((0,),), (0, 1), (64,), 4, 16, 100, torch.device("cpu"))


def test_attention_says_why_it_refuses() -> None:
    q, pages = torch.empty(1, 4, 48), torch.empty(2, 64, 48)
    assert mla.why_not(q, pages, 32) is None
    assert "r is 40" in str(mla.why_not(q, pages, 40))
    assert "dr is 128" in str(mla.why_not(torch.empty(1, 4, 160), torch.empty(2, 64, 160), 32))
    wide = torch.empty(1, 4, 512 + 64), torch.empty(2, 64, 512 + 64)
    assert "r is 512, not a power of two from 16 to 128" in str(mla.why_not(*wide, 512))
    assert mla.why_not(wide[0].to(BF16), wide[1].to(BF16), 512) is None
    assert "not 64" in str(mla.why_not(q, torch.empty(2, 32, 48), 32))
    assert "both fp32" in str(mla.why_not(q, pages.to(BF16), 32))
    with pytest.raises(ValueError, match="power of two"):
        mla.paged_mla(q, pages, [[0]], 24, 1.0, [0, 1], [0])
