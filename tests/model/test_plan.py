"""The memory plan against published arithmetic, to the byte."""

import subprocess
import sys

import pytest

from forkpoint.model.config import ModelConfigError
from forkpoint.model.geometries import geometry
from forkpoint.model.layout import StateDtypes, StateLayout
from forkpoint.model.plan import make_plan
from forkpoint.model.torch_kernels import TorchKernels
from tests.support.random_model import random_config


def test_k3_state_sizes() -> None:
    k3 = geometry("k3")
    assert make_plan(k3, 0, "bf16").slot.state == 69 * 96 * 128 * 128 * 2 == 217_055_232
    assert make_plan(k3, 0, "fp32").slot.state == 434_110_464
    plan = make_plan(k3, 0, "bf16")
    assert plan.latent_bytes_per_token == 24 * 576 * 2 == 27_648
    assert plan.slot.conv_grid == 69 * 3 * 36_864 * 2 == 15_261_696
    assert plan.slot.conv_live == 69 * 4 * 36_864 * 2
    assert plan.slot.norm_rows == 2 * 7168 * 2
    assert plan.slot.open_tile == 69 * 96 * 13_376


def test_an_open_tile_takes_what_the_kernels_of_its_dtype_keep() -> None:
    """Factors with bf16 activations: two of k, v, beta, and two int32 sums a key. Else k, v, log decays and beta."""
    k3 = geometry("k3")
    factors = 16 * (3 * 128 * 2 + 4) + 2 * 128 * 4
    rows = 16 * (2 * 128 * 4 + 128 * 4 + 4)
    assert make_plan(k3, 0).slot.open_tile == 69 * 96 * factors
    assert make_plan(k3, 0, activation_dtype="fp32").slot.open_tile == 69 * 96 * rows


def test_kimi_linear_state_sizes() -> None:
    plan = make_plan(geometry("kimi-linear"), 1000, "fp32")
    assert plan.slot.state == 20 * 2 * 1024 * 1024
    assert plan.latent_bytes_per_token == 8_064
    assert plan.latents == 8_064_000
    assert plan.slot.conv_grid == 20 * 3 * 3 * 4096 * 2


def test_k3_at_128_000_tokens_against_all_mla() -> None:
    plan = make_plan(geometry("k3"), 128_000, "bf16")
    assert plan.all_mla == 93 * 576 * 2 * 128_000 == 13_713_408_000
    assert plan.hybrid == 3_538_944_000 + 217_055_232 == 3_755_999_232
    assert f"{plan.hybrid_saving:.1%}" == "72.6%"


def test_k3_at_a_million_tokens_with_fifty_checkpoints() -> None:
    plan = make_plan(geometry("k3"), 1_000_000, "bf16", checkpoint_every=20_000)
    assert plan.all_mla == 107_136_000_000
    assert plan.hybrid == 27_865_055_232
    assert f"{plan.hybrid_saving:.1%}" == "74.0%"
    assert plan.checkpoints == 50
    assert plan.all_checkpoints.state == 10_852_761_600
    assert plan.live_with_checkpoint_states == 38_717_816_832
    assert f"{1 - plan.live_with_checkpoint_states / plan.all_mla:.0%}" == "64%"
    assert plan.all_checkpoints.conv == 50 * 15_261_696


@pytest.mark.parametrize(
    ("activation", "dtypes"), [("fp32", TorchKernels.dtypes), ("bf16", StateDtypes("float32", "bfloat16", "factors"))]
)
@pytest.mark.parametrize("tokens", [0, 15, 16, 64, 1000])
def test_a_plan_agrees_with_the_layout_of_its_kernels(tokens: int, activation: str, dtypes: StateDtypes) -> None:
    config = random_config()
    plan = make_plan(config, tokens, "fp32", activation, checkpoint_every=48, sessions=3)
    layout = StateLayout(config, dtypes)
    grid = tokens // 16 * 16
    assert plan.slot.total == layout.slot_bytes()
    assert plan.page_bytes == layout.page_bytes()
    assert plan.checkpoint.total == layout.checkpoint_bytes(grid)
    assert plan.device_total == 3 * (layout.slot_bytes() + -(-tokens // 64) * layout.page_bytes())


def test_stored_pages_are_shared_between_checkpoints_and_partial_pages_are_not() -> None:
    config = random_config()
    layout = StateLayout(config, StateDtypes())
    plan = make_plan(config, 1000, "fp32", "fp32", checkpoint_every=48)
    blobs: dict[tuple[str, int], int] = {}
    for position in range(48, 1001, 48):
        for spec in layout.parts(position):
            # A page is one blob per number of valid rows; KDA parts differ at every position.
            key = spec.shape[1] if spec.name.startswith("mla.") else position
            blobs[spec.name, key if key == 64 or not spec.name.startswith("mla.") else -position] = spec.nbytes
    assert plan.all_checkpoints.total == sum(blobs.values())
    assert plan.checkpoints == 20


def test_a_plan_lists_every_figure_by_name() -> None:
    figures = make_plan(geometry("k3"), 128_000).as_dict()
    assert figures["slot.state"] == 434_110_464
    assert figures["checkpoint.total"] == 434_110_464 + 15_261_696 + 27_648 * 128_000
    assert all(isinstance(value, int | float | str) for value in figures.values())


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"tokens": -1}, "tokens"),
        ({"tokens": 4097}, "tokens"),
        ({"tokens": 1, "kda_dtype": "fp8"}, "kda_dtype"),
        ({"tokens": 1, "activation_dtype": "int4"}, "activation_dtype"),
        ({"tokens": 1, "checkpoint_every": 0}, "checkpoint_every"),
        ({"tokens": 1, "checkpoint_every": 100}, "checkpoint_every"),
        ({"tokens": 1, "sessions": 0}, "sessions"),
    ],
)
def test_a_number_that_makes_no_plan_is_named(arguments: dict[str, int], key: str) -> None:
    with pytest.raises(ModelConfigError) as caught:
        make_plan(random_config(), **arguments)  # type: ignore[arg-type]
    assert caught.value.key == key


def test_a_plan_needs_no_torch() -> None:
    code = "import sys, forkpoint.model.plan; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=False).returncode
        == 0
    )
