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
from forkpoint.kernels.mla import plan as plans
from forkpoint.kernels.mla.triton import launch as mla
from forkpoint.kernels.mla.work import TIERS
from forkpoint.limits import PAGE_TOKENS
from tests.support.kernels import relative_rmse, same_bytes
from tests.support.triton_shim import DEVICE, INTERPRETED

R, DR = 32, 16
SCALE = 1 / math.sqrt(R + DR)
BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
SMALL = ((128, 64), (256, 128), (None, 256))
"""Tiers of splits that short sequences pass through."""
FAST = mla.Shape(16, 4, 2)
"""Fewer rows a block: interpreted tests take their time by the rows of a block."""


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


def pool(lengths: list[int], heads: int, dtype: torch.dtype, r: int = R, dr: int = DR, seed: int = 0) -> Pool:
    """Sequences of the given lengths in pages of NaN, in mixed order; the pages lie in a wider tensor."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // PAGE_TOKENS) for length in lengths]
    ids = list(range(sum(counts) + 3))
    random.Random(seed).shuffle(ids)
    room = torch.full((len(ids), 2, PAGE_TOKENS, r + dr), torch.nan, dtype=dtype, device=DEVICE)
    made = Pool(room[:, 1], [])
    for length, count in zip(lengths, counts, strict=True):
        table, ids = ids[:count], ids[count:]
        q = torch.randn(length, heads, r + dr, generator=generator) * 3
        latents = torch.randn(length, r + dr, generator=generator).to(DEVICE, dtype)
        mla.write_latents(latents, made.pages, plans.plan([table], [0, length], [0], DEVICE))
        made.sequences.append(Sequence(q.to(DEVICE, dtype), latents, table))
    return made


Spans = list[tuple[int, int, int]]
Tiers = tuple[tuple[int | None, int], ...]


def planned(made: Pool, spans: Spans, tiers: Tiers) -> tuple[Tensor, plans.MlaPlan]:
    """Queries and plan of rows first:last of each named sequence, packed in the given order."""
    cu_seqlens = [0]
    for _, first, last in spans:
        cu_seqlens.append(cu_seqlens[-1] + last - first)
    tables, starts = [made.sequences[n].table for n, _, _ in spans], [first for _, first, _ in spans]
    q = torch.cat([made.sequences[n].q[first:last] for n, first, last in spans])
    return q, plans.plan(tables, cu_seqlens, starts, DEVICE, tiers=tiers)


def attend(
    made: Pool, spans: Spans, shape: mla.Shape | None = FAST, workspace: int = 1 << 28, tiers: Tiers = SMALL, r: int = R
) -> Tensor:
    q, plan = planned(made, spans, tiers)
    return mla.paged_mla(q, made.pages, plan, r, SCALE, shape=shape, workspace=workspace)


def exact(sequence: Sequence, position: int, r: int = R) -> Tensor:
    """The attention of one row in fp64: [Hq, r]."""
    keys = sequence.latents[: position + 1].double()
    weights = torch.softmax(sequence.q[position].double() @ keys.T * SCALE, dim=1)
    return weights @ keys[:, :r]


@DTYPES
@pytest.mark.parametrize("heads", [4, 32, 96])
def test_rows_are_the_definition_at_lengths_around_pages_and_splits(heads: int, dtype: torch.dtype) -> None:
    lengths = [1, 63, 64, 65] if heads != 4 else [1, 63, 64, 65, 127, 128, 129, 256, 257, 600]
    made = pool(lengths, heads, dtype)
    ours = attend(made, [(n, length - 1, length) for n, length in enumerate(lengths)])
    reference = torch.stack([exact(s, length - 1) for s, length in zip(made.sequences, lengths, strict=True)])
    assert ours.isfinite().all()
    assert relative_rmse(ours, reference) < (5e-6 if dtype == FP32 else 4e-3)


@DTYPES
def test_the_splits_of_long_contexts_are_the_definition(dtype: torch.dtype) -> None:
    made = pool([4609], 4, dtype)
    row = attend(made, [(0, 4608, 4609)], tiers=TIERS)[0]
    assert relative_rmse(row, exact(made.sequences[0], 4608)) < (5e-6 if dtype == FP32 else 4e-3)


def test_a_prompt_is_what_the_naive_twin_makes_of_it() -> None:
    made = pool([90], 4, FP32)
    (sequence,) = made.sequences
    ours = attend(made, [(0, 0, 90)], shape=None)
    twin = naive.paged_mla(sequence.q.cpu(), made.pages.cpu(), [sequence.table], R, SCALE, [0, 90], [0])
    torch.testing.assert_close(ours.cpu(), twin, rtol=1e-4, atol=1e-5)


@DTYPES
def test_a_prompt_cut_anywhere_has_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    made = pool([264], 4, dtype)
    first = 250
    whole = attend(made, [(0, first, 264)])
    for cuts in ([first, 255, 256, 257, 264], [first, 253, 261, 264]):
        parts = [attend(made, [(0, a, b)]) for a, b in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)


def test_every_start_and_end_of_a_span_gives_the_same_rows() -> None:
    """Spans of 1 to 5 rows at every offset of four: with 4 heads each row meets each place of a block of 16."""
    made = pool([136], 4, BF16)
    whole = attend(made, [(0, 120, 136)])
    for first in range(120, 128):
        for last in range(first + 1, first + 6):
            assert torch.equal(attend(made, [(0, first, last)]), whole[first - 120 : last - 120])


@pytest.mark.parametrize("heads", [4, 32, 96])
def test_a_row_alone_has_its_bits_in_any_batch_and_any_block(heads: int) -> None:
    made = pool([66, 1, 130, 20], heads, BF16)
    spans = [(2, 127, 130), (0, 63, 65), (1, 0, 1), (3, 20, 20), (3, 18, 20)]
    if heads == 96:
        spans = [(0, 64, 66), (1, 0, 1)]
    together = attend(made, spans)
    alone = torch.cat([attend(made, [(n, t, t + 1)]) for n, a, b in spans for t in range(a, b)])
    assert torch.equal(together, alone)
    for rows in (32, 64):
        wider = attend(made, spans[:1], mla.Shape(rows, 8, 2))
        assert torch.equal(wider, together[: spans[0][2] - spans[0][1]])


def test_a_small_workspace_takes_more_launches_and_gives_the_same_bits() -> None:
    made = pool([260, 70], 4, BF16)
    spans = [(0, 250, 260), (1, 60, 70)]
    assert torch.equal(attend(made, spans, workspace=1), attend(made, spans))


def test_all_layers_of_a_step_share_one_plan() -> None:
    made = pool([130], 4, BF16)
    other = Pool(made.pages.clone(), made.sequences)
    other.pages[made.sequences[0].table[0], :30] = 1.0
    q, plan = planned(made, [(0, 120, 130)], SMALL)
    for pages in (made.pages, other.pages, made.pages):
        ours = mla.paged_mla(q, pages, plan, R, SCALE, shape=FAST)
        assert torch.equal(ours, attend(Pool(pages, made.sequences), [(0, 120, 130)]))


def test_a_plan_prepared_for_a_model_is_the_one_made_when_asked() -> None:
    arguments = [[5, 3, 2], [4]], [0, 9, 10], [150, 63], "cpu"
    early, late = mla.plan(*arguments, heads=96), mla.plan(*arguments)
    (key,) = early._works
    works = late.works(*key)
    assert [torch.equal(a.records, b.records) for a, b in zip(early._works[key].launches, works.launches, strict=True)]
    assert early._works[key].items_max == works.items_max
    assert torch.equal(early.tables, late.tables)
    assert late.places.tolist() == [2 * 64 + 22 + n for n in range(9)] + [4 * 64 + 63]


def test_a_padded_plan_gives_the_same_bits_and_writes_where_nobody_reads() -> None:
    made = pool([377, 70, 1], 70, FP32)
    batch = [(0, 376, 377), (1, 69, 70), (2, 0, 1)]
    q, plan = planned(made, batch, SMALL)
    expected = mla.paged_mla(q, made.pages, plan, R, SCALE, shape=FAST)
    ((key, _),) = plan._works.items()
    host = plans.HostPlan.of([s.table for s in made.sequences], [0, 1, 2, 3], [376, 69, 0], [key], SMALL)
    padded = host.padded()
    (records, blocks), items = padded.works[key]
    (known, same), real = host.works[key]
    assert {part.dtype for part in (*host.parts(), *padded.parts())} == {torch.int32}, "as hopper.py reads them"
    assert len(records) == items == 36 and real == len(known) == 35
    assert torch.equal(records[:real], known) and torch.equal(blocks, same)
    assert sorted(records[:, -1].tolist()) == list(range(items)), "each has a place of its own"
    assert len(padded.tables) == 16 and torch.equal(padded.tables[: len(host.tables)], host.tables)
    there = padded.there([part.to(DEVICE) for part in padded.parts()])
    assert torch.equal(mla.paged_mla(q, made.pages, there, R, SCALE, shape=FAST), expected)


def test_keys_that_weigh_nothing_leave_what_a_sequence_without_them_has() -> None:
    """512 keys of a first split that no query looks at, then one more split: its rows alone must come out."""
    made = pool([193], 4, FP32)
    (sequence,) = made.sequences
    sequence.latents[:128, :] = 0.0
    sequence.latents[:128, R] = -1e6
    sequence.q[192, :, R] = 1.0
    mla.write_latents(sequence.latents, made.pages, plans.plan([sequence.table], [0, 193], [0], DEVICE))
    row = attend(made, [(0, 192, 193)])[0]
    alone = pool([65], 4, FP32)
    alone.sequences[0].q[64] = sequence.q[192]
    latents = sequence.latents[128:].clone()
    mla.write_latents(latents, alone.pages, plans.plan([alone.sequences[0].table], [0, 65], [0], DEVICE))
    one = attend(alone, [(0, 64, 65)], tiers=((None, 64),))[0]
    two = attend(made, [(0, 192, 193)], tiers=((None, 64),))[0]
    assert same_bytes(one, two)
    assert relative_rmse(row, exact(sequence, 192)) < 5e-6


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


@pytest.mark.filterwarnings("ignore:All-NaN slice encountered")
def test_queries_of_poison_spoil_no_other_row() -> None:
    made = pool([70, 70], 4, BF16)
    spans = [(0, 66, 68), (1, 66, 68)]
    before = attend(made, spans)
    made.sequences[0].q[67] = torch.nan
    after = attend(made, spans)
    assert after[1].isnan().all()
    assert torch.equal(after[[0, 2, 3]], before[[0, 2, 3]])


def test_a_row_at_a_million_tokens_is_the_definition() -> None:
    """A table that names few pages again and again: the definition repeats with it."""
    tokens, distinct = 1_000_000, 3
    pages = -(-tokens // PAGE_TOKENS)
    made = pool([distinct * PAGE_TOKENS], 4, FP32)
    (sequence,) = made.sequences
    table = [sequence.table[n % distinct] for n in range(pages)]
    q = sequence.q[-1:]
    plan = plans.plan([table], [0, 1], [tokens - 1], DEVICE)
    if INTERPRETED:
        # The last split and no other.
        launch = plan.works(4, 16, 1 << 20).launches[0]
        last = int(launch.records[:, 4].argmax())
        pages_of_last = int(launch.records[last, 5])
        launch.records[:, 5] = 1
        launch.records[last, 5] = pages_of_last
        assert launch.records[last, 4].item() == (tokens - 1) // 2048 * 2048
        partial, scalars = torch.empty(len(launch.records) * 16, R), torch.empty(2, len(launch.records) * 16)
        mla._split(q, made.pages, plan, launch, partial, scalars, SCALE, mla.SHAPES[FP32], R)
        ours = partial[-16:-12] / scalars[1, -16:-12, None]
        first = int(launch.records[last, 4])
    else:
        ours, first = mla.paged_mla(q, made.pages, plan, R, SCALE)[0], 0
    keys = sequence.latents.double()[torch.arange(first, tokens, device=DEVICE) % (distinct * PAGE_TOKENS)]
    weights = torch.softmax(q[0].double() @ keys.T * SCALE, dim=1)
    assert relative_rmse(ours, weights @ keys[:, :R]) < 2e-5


def test_latents_go_to_their_places_and_nowhere_else() -> None:
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(7, R + DR, generator=generator).to(DEVICE)
    for dtype in (BF16, FP32):
        ours = torch.full((4, 2, PAGE_TOKENS, R + DR), -7.0, dtype=dtype, device=DEVICE)
        twin = ours.clone()
        arguments = [[3], [0, 2]], [0, 2, 7], [5, 62]
        mla.write_latents(latents, ours[:, 0], mla.plan(*arguments, DEVICE))
        naive.write_latents(latents.to(dtype), twin[:, 0], *arguments)
        assert torch.equal(ours, twin)
    with pytest.raises(ValueError, match="6 rows of latents, the plan has 7"):
        mla.write_latents(latents[:6], ours[:, 0], mla.plan(*arguments, DEVICE))


def test_a_batch_without_rows_is_empty() -> None:
    made = pool([5], 4, BF16)
    assert attend(made, [(0, 5, 5)]).shape == (0, 4, R)
    mla.write_latents(made.sequences[0].latents[:0], made.pages, plans.plan([], [0], [], DEVICE))


def test_a_plan_covers_every_block_and_split_once() -> None:
    made = plans.plan([[0] * 200, [0] * 2, []], [0, 100, 101, 101], [9000, 64, 9], "cpu")
    works = made.works(96, 64, 1000)
    assert max(launch.records.shape[0] for launch in works.launches) == works.items_max <= 1000
    assert len(works.launches) == 2
    blocks = [row for launch in works.launches for row in launch.blocks.tolist()]
    assert [line for line, _, _, _ in blocks] == [*range(0, 9600, 64), 9600, 9664]
    assert [inside for _, inside, _, _ in blocks] == [64] * 150 + [64, 32]
    assert [splits for _, _, _, splits in blocks] == [4 + 3] * 150 + [1, 1]
    for launch in works.launches:
        slots = sorted(launch.records[:, 7].tolist())
        assert slots == list(range(len(slots))) == [s for _, _, a, n in launch.blocks.tolist() for s in range(a, a + n)]


def test_splits_meet_without_a_gap_and_end_with_the_last_row_of_their_block() -> None:
    tokens = 20_000
    (launch,) = plans.plan([list(range(313))], [0, 1], [tokens - 1], "cpu").works(32, 64, 1 << 20).launches
    records = sorted(launch.records.tolist(), key=lambda record: record[7])
    keys, pages = [record[4] for record in records], [record[5] for record in records]
    assert keys == [*range(0, 4096, 1024), *range(4096, 20_000, 2048)]
    assert all(key + count * 64 == following for (key, following), count in zip(pairwise(keys), pages, strict=False))
    assert keys[-1] + pages[-1] * 64 == -(-tokens // 64) * 64
    assert [record[6] for record in records] == [key // 64 for key in keys]


def test_neighbouring_blocks_walk_the_same_keys_at_the_same_time() -> None:
    (launch,) = plans.plan([list(range(20))], [0, 3], [1200], "cpu").works(96, 64, 1 << 20).launches
    assert [record[4] for record in launch.records.tolist()] == [0] * 5 + [1024] * 5


def test_long_items_come_first_and_those_of_a_split_lie_side_by_side() -> None:
    made = plans.plan([list(range(100)), list(range(40))], [0, 1, 2], [6000, 2500], "cpu")
    (launch,) = made.works(96, 64, 999).launches
    found = [(record[5], record[4], record[0] // 96) for record in launch.records.tolist()]
    assert [pages for pages, _, _ in found] == sorted((pages for pages, _, _ in found), reverse=True)
    assert found[::2] == found[1::2]  # two blocks a row
    assert found[:4:2] == [(30, 4096, 0), (16, 0, 0)]


def test_a_plan_says_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="needs 2 pages"):
        plans.plan([[0]], [0, 1], [64], "cpu")
    with pytest.raises(ValueError, match="do not end at pages"):
        plans.plan([[0]], [0, 1], [0], "cpu", tiers=((None, 100),)).works(4, 16, 9)


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
    assert "9.0" in str(mla.why_not_hopper(wide[1].to(BF16), 512))
    with pytest.raises(ValueError, match="power of two"):
        mla.paged_mla(q, pages, mla.plan([[0]], [0, 1], [0], "cpu"), 24, 1.0)
    with pytest.raises(ValueError, match="q has 1 rows, the plan 2"):
        mla.paged_mla(q, pages, mla.plan([[0]], [0, 2], [0], "cpu"), 32, 1.0)


@pytest.mark.skipif(INTERPRETED, reason="Gluon has no interpreter: this compares compiled kernels")
@pytest.mark.parametrize("heads", [32, 96])
def test_both_kernels_have_the_same_bits(heads: int) -> None:
    """hopper.py against split.py at the published width, over partial pages of NaN, in mixed batches."""
    made = pool([700, 65, 1, 64, 513, 5000], heads, BF16, r=512, dr=64)
    spans = [(0, 690, 700), (1, 64, 65), (2, 0, 1), (3, 63, 64), (4, 500, 513), (5, 4090, 4100), (5, 4999, 5000)]
    assert mla.why_not_hopper(made.pages, 512) is None
    ours = attend(made, spans, shape=None, tiers=TIERS, r=512)
    assert ours.isfinite().all()
    assert torch.equal(ours, attend(made, spans, shape=mla.SHAPES[BF16], tiers=TIERS, r=512))
    rows = [(n, t) for n, a, b in spans for t in range(a, b)]
    alone = [attend(made, [(n, t, t + 1)], shape=None, tiers=TIERS, r=512) for n, t in rows]
    assert torch.equal(ours, torch.cat(alone))
    reference = torch.stack([exact(made.sequences[n], t, 512) for n, t in rows])
    assert relative_rmse(ours, reference) < 4e-3
