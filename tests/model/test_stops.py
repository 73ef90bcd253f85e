"""Stop ids: the config's and generation_config.json's, not the tokenizer's."""

import json
from pathlib import Path

import pytest

from forkpoint.model.config import ModelConfigError
from forkpoint.model.stops import stop_ids
from tests.support.random_model import random_config


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        (2, None, (2,)),
        (2, {}, (2,)),
        (2, {"eos_token_id": None}, (2,)),
        (2, {"eos_token_id": 2}, (2,)),
        (2, {"eos_token_id": [5, 2, 9]}, (2, 5, 9)),
        ([7, 2], {"eos_token_id": 5}, (7, 2, 5)),
    ],
)
def test_the_ids_of_both_files_stop_each_once(tmp_path: Path, config: object, generation: object, ids: object) -> None:
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert stop_ids(random_config(eos_token_id=config), tmp_path) == ids


@pytest.mark.parametrize(
    ("content", "key"),
    [
        ("nonsense", "generation_config.json"),
        ("[]", "generation_config.json"),
        ('{"eos_token_id": "x"}', "eos_token_id"),
        ('{"eos_token_id": []}', "eos_token_id"),
        ('{"eos_token_id": [2, 96]}', "eos_token_id"),
        ('{"eos_token_id": true}', "eos_token_id"),
    ],
)
def test_a_bad_generation_config_is_refused_by_name(tmp_path: Path, content: str, key: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ModelConfigError) as caught:
        stop_ids(random_config(vocab_size=96), tmp_path)
    assert caught.value.key == key
    assert str(tmp_path) in caught.value.source
