"""paged_mla against dense fp64 attention, and to the bit against itself over cuts, batches and poisoned pages."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from forkpoint.kernels.mla import blocks, ragged, shared
from forkpoint.kernels.mla.naive import paged_mla, write_latents
from tests.support.kernels import negative_zeros, same_bytes

NAN = float("nan")
# heads, r, dr: four tokens a block; five, with a row to spare; one; two blocks a token, one of them part full.
GEOMETRIES = {"4 heads": (4, 128, 32), "3 heads": (3, 24, 8), "16 heads": (16, 32, 16), "20 heads": (20, 16, 16)}


@dataclass(frozen=True)
class Sequence:
    q: Tensor
    latents: Tensor
    r: int

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    def dense(self) -> Tensor:
        """Softmax attention in fp64, [T, heads, r]."""
        tokens = len(self.latents)
        q, keys = self.q.double().transpose(0, 1), self.latents.double()
        scores = (q @ keys.t()) * self.scale
        future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ keys[:, : self.r]).transpose(0, 1)


def sequence(tokens: int, geometry: str = "3 heads") -> Sequence:
    heads, r, dr = GEOMETRIES[geometry]
    return Sequence(torch.randn(tokens, heads, r + dr) * 2, torch.randn(tokens, r + dr), r)


class Pool:
    """Poisoned pages of two layers, of which the second is used: page strides are not page sizes."""

    def __init__(self, pages: int, width: int) -> None:
        self.both = torch.full((pages, 2, 64, width), NAN)
        self.layer = self.both[:, 1]
        self.free = torch.randperm(pages).tolist()

    def table(self, tokens: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-tokens // 64))]

    def feed(self, pieces: list[tuple[Sequence, list[int], int, int]]) -> list[Tensor]:
        cu_seqlens = [0]
        for _, _, start, end in pieces:
            cu_seqlens.append(cu_seqlens[-1] + end - start)
        tables, starts = [table for _, table, _, _ in pieces], [start for _, _, start, _ in pieces]
        latents = torch.cat([s.latents[a:b] for s, _, a, b in pieces])
        write_latents(latents, self.layer, tables, cu_seqlens, starts)
        first = pieces[0][0]
        q = torch.cat([s.q[a:b] for s, _, a, b in pieces])
        out = paged_mla(q, self.layer, tables, first.r, first.scale, cu_seqlens, starts)
        return list(torch.split(out, [b - a for _, _, a, b in pieces]))


def alone(s: Sequence, cuts: list[int]) -> Tensor:
    pool = Pool(len(s.latents) // 64 + 4, s.q.shape[2])
    table = pool.table(len(s.latents))
    outputs: list[Tensor] = []
    position = 0
    for length in cuts:
        outputs += pool.feed([(s, table, position, position + length)])
        position += length
    return torch.cat(outputs)


LENGTHS = [1, 2, 16, 63, 64, 65, 127, 128, 129, 511, 512, 513, 575, 577, 1023, 1025]


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_it_agrees_with_dense_attention_in_fp64(geometry: str) -> None:
    for tokens in (1, 65, 530):
        s = sequence(tokens, geometry)
        torch.testing.assert_close(alone(s, [tokens]).double(), s.dense(), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_every_length_around_pages_and_splits_agrees_with_dense_attention(tokens: int) -> None:
    s = sequence(tokens)
    whole = alone(s, [tokens])
    torch.testing.assert_close(whole.double(), s.dense(), rtol=1e-5, atol=5e-6)
    if tokens > 1:
        assert same_bytes(alone(s, [tokens - 1, 1]), whole)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_any_cut_gives_the_same_bytes(geometry: str) -> None:
    s = sequence(150, geometry)
    whole = alone(s, [150])
    assert bool(torch.isfinite(whole).all())
    for cuts in ([1] * 150, [64, 64, 22], [63, 1, 1, 85], [7, 0, 90, 2, 51], [2] * 75, [149, 1]):
        assert same_bytes(alone(s, cuts), whole), cuts


def test_cuts_around_a_split_give_the_same_bytes() -> None:
    s = sequence(1030)
    whole = alone(s, [1030])
    for cuts in ([510] + [1] * 8 + [505] + [1] * 7, [512, 512, 6], [511, 2, 510, 2, 5], [100, 930]):
        assert same_bytes(alone(s, cuts), whole), cuts


def test_both_loop_orders_give_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    s = sequence(700, "4 heads")
    borders = {"shared": 1, "ragged": 1_000_000}
    results: list[Tensor] = []
    for name, border in borders.items():
        monkeypatch.setattr(blocks, "SHARED_BLOCKS", border)
        monkeypatch.setattr(blocks, "RAGGED_PAGES", 1_000_000)
        blocks.block_plan.cache_clear()
        results.append(alone(s, [300, 1, 3, 391, 5]))
        plan = blocks.block_plan(((0,),), (0, 9), (3,), 4, torch.device("cpu"))
        assert len(getattr(plan, name)) == 1
    blocks.block_plan.cache_clear()
    assert same_bytes(*results)


def test_a_long_context_takes_the_shared_order_and_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    s = sequence(200)
    whole = alone(s, [200])
    monkeypatch.setattr(blocks, "RAGGED_PAGES", 2)
    blocks.block_plan.cache_clear()
    assert same_bytes(alone(s, [150] + [1] * 50), whole)
    blocks.block_plan.cache_clear()


@pytest.mark.parametrize("geometry", ["4 heads", "3 heads", "20 heads"])
def test_a_packed_batch_equals_each_sequence_alone(geometry: str) -> None:
    lengths = [(0, 1), (63, 64), (64, 65), (511, 512), (512, 513), (0, 130), (100, 700), (5, 5), (600, 603), (30, 64)]
    sequences = [sequence(710, geometry) for _ in lengths]
    pool = Pool(12 * len(lengths) + 3, sequences[0].q.shape[2])
    tables = [pool.table(710) for _ in lengths]
    everyone = list(zip(sequences, tables, lengths, strict=True))
    first = pool.feed([(s, table, 0, a) for s, table, (a, _) in everyone])
    middle = pool.feed([(s, table, a, b) for s, table, (a, b) in everyone])
    order = torch.randperm(len(lengths)).tolist()
    last = pool.feed([(everyone[n][0], everyone[n][1], lengths[n][1], lengths[n][1] + 3) for n in order])
    for n, (s, _, (_, end)) in enumerate(everyone):
        whole = alone(Sequence(s.q[: end + 3], s.latents[: end + 3], s.r), [end + 3])
        assert same_bytes(torch.cat((first[n], middle[n], last[order.index(n)])), whole)


def test_pages_may_be_anywhere_and_shared_between_sequences() -> None:
    """A fork reads its parent's full pages."""
    parent = sequence(140)
    child = Sequence(
        torch.cat((parent.q[:128], sequence(30).q)), torch.cat((parent.latents[:128], torch.randn(30, 32))), 24
    )
    pool = Pool(8, 32)
    table = pool.table(140)
    whole = pool.feed([(parent, table, 0, 140)])[0]
    branch = [*table[:2], *pool.table(30)]
    pieces = pool.feed([(child, branch, 128, 158), (parent, table, 139, 140)])
    assert same_bytes(pieces[0], alone(child, [158])[128:])
    assert same_bytes(pieces[1], whole[139:])


def test_latents_are_written_at_their_places_and_nowhere_else() -> None:
    s = sequence(100)
    pool = Pool(5, 32)
    table = pool.table(100)
    pool.feed([(s, table, 0, 60)])
    pool.feed([(s, table, 60, 100)])
    assert same_bytes(pool.layer[table[0]], s.latents[:64])
    assert same_bytes(pool.layer[table[1], :36], s.latents[64:])
    assert bool(pool.layer[table[1], 36:].isnan().all())
    assert bool(pool.layer[pool.free].isnan().all()) and bool(pool.both[:, 0].isnan().all())


def test_a_large_score_does_not_overflow() -> None:
    s = sequence(300)
    large = Sequence(s.q * 1e4, s.latents * 10, s.r)
    out = alone(large, [300])
    assert bool(torch.isfinite(out).all())
    # Scores of some thousands: fp32 has them to 1e-3, which the exponential hands on. What this guards is overflow.
    torch.testing.assert_close(out.double(), large.dense(), rtol=1e-2, atol=1e-1)


def test_zeros_of_the_output_are_positive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "bmm_fixed", negative_zeros)
    monkeypatch.setattr(ragged, "bmm_fixed", negative_zeros)
    s = sequence(70)
    values = s.latents.clone()
    values[:, : s.r] = 0.0
    for cuts in ([70], [1] * 70):
        out = alone(Sequence(s.q, values, s.r), cuts)
        assert same_bytes(out, torch.zeros_like(out))


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 65 tokens needs 2 pages, its table has 1"):
        paged_mla(torch.zeros(1, 3, 32), torch.zeros(2, 64, 32), [[0]], 24, 1.0, [0, 1], [64])


def test_no_rows_give_no_output() -> None:
    assert paged_mla(torch.zeros(0, 3, 32), torch.zeros(2, 64, 32), [[0]], 24, 1.0, [0, 0], [7]).shape == (0, 3, 24)
