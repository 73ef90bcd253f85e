"""open_engine: from a model folder to an engine that answers."""

from pathlib import Path

import pytest
import torch

from forkpoint.errors import ConfigError
from forkpoint.model.layout import StateDtypes, StateLayout
from forkpoint.server.engine.batch import Work
from forkpoint.server.engine.facts import layout_tag
from forkpoint.server.engine.open import open_engine
from forkpoint.server.engine.warm_up import warm_up
from tests.support.engines import GREEDY, MakeEngine, generate
from tests.support.model_folder import write_folder
from tests.support.random_model import fitted, random_config, random_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, device: torch.device) -> Path:
    """A small random model in the Hugging Face form."""
    config = random_config("bounded", vocab_size=272, **fitted(device))
    return write_folder(tmp_path_factory.mktemp("model"), config, random_weights(config))


def test_a_folder_opens_as_an_engine_and_its_tokenizer(folder: Path, device: torch.device) -> None:
    engine, tokenizer = open_engine(folder, str(device), slots=2, pages=8)
    capacity = engine.capacity()
    assert (capacity.slots_total, capacity.slots_free, capacity.pages_total, capacity.pages_free) == (2, 2, 8, 8)
    assert engine.facts.vocab_size == 272 and engine.facts.context_limit == 4096
    assert len(engine.facts.model_digest) == len(engine.facts.tokenizer_digest) == 32
    assert engine.facts.tokenizer_digest == tokenizer.digest()
    sequence = engine.create()
    engine.step([Work(sequence, 0, tuple(tokenizer.encode(b"fork and resume")), GREEDY)])
    assert len(generate(engine, sequence, 3)) == 3
    assert engine.check() == []


def test_two_engines_of_one_folder_agree_on_their_facts_and_their_tokens(folder: Path, device: torch.device) -> None:
    engines = [open_engine(folder, str(device), slots=1 + n, pages=4 + n)[0] for n in range(2)]
    assert engines[0].facts == engines[1].facts
    answers = []
    for engine in engines:
        sequence = engine.create()
        engine.step([Work(sequence, 0, (1, 2, 3))])
        answers.append(generate(engine, sequence, 8))
    assert answers[0] == answers[1]


def test_the_thread_count_is_set_and_belongs_to_the_numerics_id(folder: Path, torch_threads: None) -> None:
    ids = set()
    for threads in (1, 2):
        engine, _ = open_engine(folder, slots=1, pages=1, threads=threads)
        assert torch.get_num_threads() == threads
        ids.add(engine.facts.numerics_id)
    assert len(ids) == 2


@pytest.mark.parametrize("wanted", [True, False])
def test_whether_steps_may_be_replayed_is_a_setting(folder: Path, wanted: bool) -> None:
    engine, _ = open_engine(folder, slots=1, pages=1, cuda_graphs=wanted)
    assert engine.decoder.replay is wanted


@pytest.mark.parametrize("setting", ["slots", "pages", "threads"])
def test_a_setting_out_of_range_is_named(folder: Path, setting: str) -> None:
    with pytest.raises(ConfigError) as raised:
        open_engine(folder, **{setting: 0})  # type: ignore[arg-type]
    assert raised.value.key == setting


def test_a_folder_without_a_model_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        open_engine(tmp_path)


def test_the_layout_tag_changes_with_every_shape_and_dtype_of_a_part() -> None:
    layouts = [
        StateLayout(random_config("bounded")),
        StateLayout(random_config("bounded", heads=4)),
        StateLayout(random_config("bounded", value_dim=24)),
        StateLayout(random_config("bounded", layers=8)),
        StateLayout(random_config("bounded", kv_lora_rank=16)),
        StateLayout(random_config("bounded"), StateDtypes(kda="bfloat16")),
        StateLayout(random_config("bounded"), StateDtypes(activation="bfloat16")),
    ]
    assert len({layout_tag(layout) for layout in layouts}) == len(layouts)
    assert layout_tag(layouts[0]) == layout_tag(StateLayout(random_config("softplus")))


@pytest.mark.parametrize(("slots", "pages"), [(1, 1), (1, 9), (5, 3), (70, 80)])
def test_a_thorough_warm_up_leaves_an_engine_as_it_was(make_engine: MakeEngine, slots: int, pages: int) -> None:
    engine = make_engine(slots=slots, pages=pages)
    warm_up(engine, thorough=True)
    assert engine.check() == []
    capacity = engine.capacity()
    assert (capacity.slots_free, capacity.pages_free) == (slots, pages)
