"""Tests of the tests: the golden logits tell every mistake, and nothing but mistakes."""

import pytest

from forkpoint.model.weights import WeightsError
from tests.oracles.golden import Golden, agrees
from tests.oracles.mistakes import MISTAKES, NONE, Bench, Change
from tests.oracles.models import oracle_model
from tests.support.distance import Distance, distance
from tests.support.model_runs import ModelRun


def measured(name: str, change: Change, patch: pytest.MonkeyPatch) -> Distance:
    """How far a changed model on a CPU is from mlx-lm's logits."""
    model, golden = oracle_model(name), Golden.read(name, "mlx-lm")
    bench = Bench(model.config, dict(model.weights), patch)
    change(bench)
    run = ModelRun(bench.config, bench.weights, slots=1, tokens=len(model.token_ids))
    for alter in bench.built:
        alter(run.decoder)
    return distance(run.consume([(0, model.token_ids)]), golden.logits)


@pytest.mark.parametrize(("mistake", "name"), [(m, name) for m, (names, _) in MISTAKES.items() for name in names])
def test_a_mistake_shows(mistake: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    far = measured(name, MISTAKES[mistake][1], monkeypatch)
    assert not agrees(name, far), far


@pytest.mark.parametrize(("change", "name"), [(c, name) for c, (names, _) in NONE.items() for name in names])
def test_another_order_of_the_same_sums_does_not(change: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    far = measured(name, NONE[change][1], monkeypatch)
    assert agrees(name, far), far


@pytest.mark.parametrize("name", ["kimi-linear", "k3"])
@pytest.mark.parametrize("mla", [(3, 7, 8), (4, 8)], ids=["counted-from-0", "every-fourth"])
def test_layers_counted_wrongly_are_refused(name: str, mla: tuple[int, ...]) -> None:
    """Where shapes agree a wrong layer kind still misses tensors, so it never gets as far as wrong numbers."""
    model = oracle_model(name)
    raw = dict(model.config.raw)
    kda = [layer for layer in range(1, 10) if layer not in mla]
    raw["linear_attn_config"] = {**raw["linear_attn_config"], "kda_layers": kda, "full_attn_layers": list(mla)}
    with pytest.raises(WeightsError, match="is missing"):
        ModelRun(type(model.config).from_dict(raw), model.weights)
