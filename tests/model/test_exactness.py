"""A smoke test of exactness at the decoder; tests/exactness holds the whole suite."""

import pytest
import torch

from forkpoint.model.rows import RowBatch
from tests.support.distance import distance
from tests.support.model_runs import ModelRun, random_ids
from tests.support.random_model import Kind, fitted, random_model
from tests.support.reference_model import reference_logits
from tests.support.routes import RecordedRoutes

KINDS: list[Kind] = ["kimi-linear", "k3"]


@pytest.mark.parametrize("kind", KINDS)
def test_one_pass_cut_passes_and_single_tokens_give_equal_logits_and_parts(kind: Kind, device: torch.device) -> None:
    config, weights = random_model(kind, **fitted(device, value_dim=24))
    ids = random_ids(config, 140)
    run = ModelRun(config, weights, device, tokens=192)
    whole = run.consume([(0, ids)])
    cut = run.cut(1, ids, [7, 9, 1, 30, 17, 0, 64])
    single = run.cut(2, ids, [1] * 139)
    assert whole.isfinite().all()
    assert torch.equal(whole, cut)
    assert torch.equal(whole, single)
    assert run.parts(0) == run.parts(1) == run.parts(2)
    assert torch.equal(run.tensors.norm_rows[0], run.tensors.norm_rows[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_packed_with_others_gives_the_logits_it_gives_alone(kind: Kind, device: torch.device) -> None:
    config, weights = random_model(kind, **fitted(device))
    run = ModelRun(config, weights, device, tokens=128)
    a, b, c = (random_ids(config, count, seed=count) for count in (70, 33, 1))
    alone = run.consume([(0, a)])
    run.consume([(1, a[:20]), (2, b[:5])])
    packed = run.consume([(2, b[5:]), (3, c), (1, a[20:])])
    assert torch.equal(packed[-50:], alone[20:])
    assert run.parts(0) == run.parts(1)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_a_sequence_reaches_those_packed_with_it(kind: Kind, device: torch.device) -> None:
    """One sequence's tokens are no numbers, in every layer, in its routes and in every entry of its bank."""
    config, weights = random_model(kind, layers=5, mla_layers=[3, 5], **fitted(device))
    weights["model.embed_tokens.weight"][7] = torch.nan
    run = ModelRun(config, weights, device, tokens=64)
    a, b = ([token for token in random_ids(config, 40, seed=seed) if token != 7] for seed in (1, 2))
    alone = [run.consume([(0, ids)]) for ids in (a[:20], a[20:])]
    damaged = run.consume([(1, [7] * 5), (2, a[:20]), (3, b)])
    assert damaged[:5].isnan().all()
    assert torch.equal(damaged[5:25], alone[0])
    assert damaged[25:].isfinite().all()
    assert torch.equal(run.consume([(2, a[20:]), (1, [7])])[:-1], alone[1])
    assert run.parts(0) == run.parts(2)


@pytest.mark.parametrize("block", [1, 3, 12])
def test_attention_residuals_in_blocks_of_any_size_are_right_and_exact(block: int, device: torch.device) -> None:
    """Blocks of one layer; whole ones and an unfinished one; one block that the model does not fill."""
    config, weights = random_model(
        "k3", layers=7, mla_layers=[3, 6, 7], attn_res_block_size=block, **fitted(device, heads=2)
    )
    ids = random_ids(config, 40)
    run = ModelRun(config, weights, device, tokens=64)
    routes = RecordedRoutes(run.decoder)
    whole = run.consume([(0, ids)])
    far = distance(whole, reference_logits(config.raw, weights, ids))
    assert far.within(config, device), far
    far = distance(whole, reference_logits(config.raw, weights, ids, routes.layers()))
    assert far.within(config, device, given_routes=True), far
    assert torch.equal(run.cut(1, ids, [7, 9, 1]), whole)
    packed = run.consume([(2, ids[:5]), (3, ids)])
    assert torch.equal(packed[5:], whole)


def test_norm_rows_are_the_last_two_positions_final_norm_rows(device: torch.device) -> None:
    config, weights = random_model(**fitted(device))
    run = ModelRun(config, weights, device)
    run.cut(0, random_ids(config, 21), [20])
    rows = torch.cat(run.sequences[0].rows)
    assert torch.equal(run.tensors.norm_rows[0, 20 % 2], rows[20])
    assert torch.equal(run.tensors.norm_rows[0, 19 % 2], rows[19])
    run.consume([(1, [5])])
    assert torch.equal(run.tensors.norm_rows[1, 0], run.sequences[1].rows[0][0])
    assert run.tensors.norm_rows[1, 1].isnan().all()


def test_an_empty_sequence_in_a_batch_changes_nothing(device: torch.device) -> None:
    config, weights = random_model(**fitted(device))
    run = ModelRun(config, weights, device)
    run.consume([(0, random_ids(config, 40))])
    before, rows = run.parts(0), run.tensors.norm_rows[0].clone()
    logits = run.consume([(0, []), (1, [3, 4])])
    assert logits.shape == (2, config.vocab_size)
    assert run.parts(0) == before
    assert torch.equal(run.tensors.norm_rows[0], rows)


def test_a_batch_without_rows_gives_no_rows(device: torch.device) -> None:
    config, weights = random_model(**fitted(device))
    run = ModelRun(config, weights, device)
    assert run.consume([]).shape == (0, config.vocab_size)


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (RowBatch([1], [0, 1], [0], [0, 1], [[0]]), "2 slots"),
        (RowBatch([1, 2], [0, 1], [0], [0], [[0]]), "2 rows"),
        (RowBatch([1, 2], [0, 1, 2], [0, 0], [1, 1], [[0], [1]]), "twice"),
        (RowBatch([1, 2], [0, 2], [63], [0], [[0]]), "pages end"),
        (RowBatch([1], [0, 1], [-1], [0], [[0]]), "starts at -1"),
        (RowBatch([96], [0, 1], [0], [0], [[0]]), "outside the vocabulary"),
    ],
)
def test_a_batch_whose_lists_do_not_fit_is_refused(batch: RowBatch, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        batch.check(vocab_size=96)
