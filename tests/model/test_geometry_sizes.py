"""Configs of published geometries with sizes of one's own."""

import pytest

from forkpoint.model.config import ModelConfig, ModelConfigError
from forkpoint.model.geometries import GEOMETRIES, geometry
from forkpoint.model.geometry_sizes import GeometrySizes, sized_config

IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_without_sizes_all_but_the_ids_of_the_tokenizer_is_as_published(name: str) -> None:
    raw = sized_config(name, GeometrySizes())
    text = raw.get("text_config", raw)
    published = dict(geometry(name).raw)
    assert {key for key in published if published[key] != text[key]} == set(IDS)
    assert ("text_config" in raw) == (name == "k3")
    assert ModelConfig.from_dict(raw).unsupported == ()


def test_k3_in_full_ends_with_two_mla_layers_and_cut_short_where_it_is_cut() -> None:
    assert ModelConfig.from_dict(sized_config("k3", GeometrySizes(layers=93))).mla_layers[-2:] == (91, 92)
    cut = ModelConfig.from_dict(sized_config("k3", GeometrySizes(layers=14)))
    assert (cut.num_layers, cut.mla_layers) == (14, (3, 7, 11))


def test_what_depends_on_a_size_keeps_its_ratio() -> None:
    sizes = GeometrySizes(hidden=128, heads=5, ffn=64, experts=12, vocab=300)
    config = ModelConfig.from_dict(sized_config("k3", sizes))
    assert config.moe is not None
    assert (config.hidden_size, config.moe.latent_size) == (128, 64)
    assert (config.kda_heads, config.mla_heads) == (5, 5)
    assert (config.moe.intermediate_size, config.intermediate_size) == (64, 64 * 33792 // 3072)
    assert (config.moe.experts, config.moe.per_token, config.vocab_size) == (12, 12, 300)
    plain = ModelConfig.from_dict(sized_config("kimi-linear", sizes))
    assert plain.moe is not None and plain.moe.per_token == 8 and plain.intermediate_size == 9 * 64


@pytest.mark.parametrize(
    ("name", "sizes", "field"),
    [
        ("k3", GeometrySizes(layers=3), "layers"),
        ("k3", GeometrySizes(layers=94), "layers"),
        ("kimi-linear", GeometrySizes(layers=28), "layers"),
        ("kimi-linear", GeometrySizes(layers=0), "layers"),
        ("k3", GeometrySizes(ffn=48), "ffn"),
        ("k3", GeometrySizes(hidden=96), "hidden"),
        ("kimi-linear", GeometrySizes(heads=-1), "heads"),
        ("kimi-linear", GeometrySizes(experts=0), "experts"),
        ("kimi-linear", GeometrySizes(vocab=262), "vocab"),
        ("gpt", GeometrySizes(), "model"),
    ],
)
def test_a_size_that_does_not_go_is_named(name: str, sizes: GeometrySizes, field: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        sized_config(name, sizes)
    assert caught.value.key == field


def test_widths_that_mxfp4_cannot_have_are_fine_without_it() -> None:
    assert ModelConfig.from_dict(sized_config("kimi-linear", GeometrySizes(ffn=48, hidden=96))).hidden_size == 96
