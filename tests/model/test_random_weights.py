"""Random weights: each tensor follows from its name and the seed alone, on scales that a model can compute with."""

import pytest
import torch

from forkpoint.kernels.experts.mxfp4 import unpack
from forkpoint.model.random_weights import PIECE_VALUES, random_tensor

NAME = "model.layers.3.self_attn.q_proj.weight"


def test_a_tensor_depends_on_its_name_and_seed_alone() -> None:
    shape = (3, PIECE_VALUES // 2 + 1)
    first = random_tensor(NAME, shape, seed=4)
    random_tensor("model.norm.weight", (9,), seed=4)
    torch.manual_seed(99)
    assert torch.equal(random_tensor(NAME, shape, seed=4), first)
    assert not torch.equal(random_tensor(NAME, shape, seed=5), first)
    assert not torch.equal(random_tensor(NAME.replace("q_", "k_"), shape, seed=4), first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_dtype_holds_the_same_values(dtype: torch.dtype) -> None:
    made = random_tensor(NAME, (64, 48), 1, dtype)
    assert made.dtype == dtype
    assert torch.equal(made.float(), random_tensor(NAME, (64, 48), 1))


@pytest.mark.parametrize(("name", "inputs"), [(NAME, 48), (NAME, 3000), ("lm_head.weight", 700)])
def test_a_product_keeps_the_scale_of_its_rows(name: str, inputs: int) -> None:
    assert random_tensor(name, (400, inputs)).norm(dim=1).mean() == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("inputs", [32, 256, 3584])
def test_quantised_products_do_so_within_a_power_of_two(inputs: int) -> None:
    packed = random_tensor("e.w1.weight_packed", (200, inputs // 2))
    scales = random_tensor("e.w1.weight_scale", (200, inputs // 32))
    assert packed.dtype == scales.dtype == torch.uint8
    assert torch.unique(packed).numel() == 256 and torch.unique(scales).numel() == 4
    assert 0.7 < unpack(packed, scales).pow(2).mean().sqrt() * inputs**0.5 < 1.7


def test_decays_are_those_of_a_model_before_its_training() -> None:
    a = random_tensor("model.layers.0.self_attn.A_log", (4000,)).exp()
    assert 0.99 < a.min() < 1.2 and 15.8 < a.max() < 16.2
    step = torch.nn.functional.softplus(random_tensor("model.layers.0.self_attn.dt_bias", (4000,)))
    assert 0.9e-3 < step.min() < 1.1e-3 and 0.09 < step.max() < 0.11
    assert random_tensor("model.norm.weight", (4000,)).mean() == pytest.approx(1, abs=0.02)
