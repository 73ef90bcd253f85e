"""The decoder with experts on the Triton kernels, both published architectures, small enough for the interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from forkpoint.model.config import ModelConfig
from tests.support import triton_shim
from tests.support.model_runs import ModelRun, random_ids
from tests.support.random_model import Kind, random_config, random_weights
from tests.triton.test_decoder import triton_run

pytestmark = pytest.mark.skipif(not triton_shim.AVAILABLE, reason=triton_shim.REASON)
KINDS: list[Kind] = ["kimi-linear", "k3"]
TOKENS = 18


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A KDA layer with a dense block, an MLA layer with experts; in `k3` each opens a block of Attention Residuals."""
    sizes = {"heads": 1, "key_dim": 128, "vocab_size": 64, "intermediate_size": 64, "kv_lora_rank": 16}
    if request.param == "k3":
        sizes["attn_res_block_size"] = 1
    config = random_config(request.param, layers=2, mla_layers=[2], qk_rope_head_dim=16, **sizes)
    return config, random_weights(config, seed=11)


def test_prefill_cuts_decoded_tokens_and_neighbours_change_nothing(
    model: tuple[ModelConfig, dict[str, Tensor]],
) -> None:
    config, weights = model
    a, b = random_ids(config, TOKENS), random_ids(config, 5, seed=5)
    run = triton_run(config, weights)
    whole = run.consume([(0, a)])
    assert whole.isfinite().all()
    assert torch.equal(run.cut(1, a, [13] + [1] * (TOKENS - 14)), whole)
    assert run.parts(0) == run.parts(1)
    run.consume([(2, a[:15]), (3, b[:4])])
    packed = run.consume([(3, b[4:]), (2, a[15:])])
    assert torch.equal(packed[1:], whole[15:])
    assert run.parts(0) == run.parts(2)
    assert torch.equal(run.tensors.norm_rows[0], run.tensors.norm_rows[2])


def test_the_decoder_is_close_to_its_plain_torch_twin(model: tuple[ModelConfig, dict[str, Tensor]]) -> None:
    """The twin computes in fp32; near-equal experts may be chosen otherwise for a row of bf16, so most rows are."""
    config, weights = model
    ids = random_ids(config, TOKENS)
    ours = triton_run(config, weights).consume([(0, ids)]).cpu()
    twin = ModelRun(config, weights, "cpu", slots=1).consume([(0, ids)])
    errors = (ours - twin).abs().amax(dim=1)
    assert errors.median() <= 0.03 * twin.abs().max()


def test_sizes_beyond_the_kernels_are_refused_with_a_reason() -> None:
    from forkpoint.model.triton_kernels import why_not

    sizes: dict[str, Any] = {"heads": 1, "key_dim": 128, "kv_lora_rank": 16, "qk_rope_head_dim": 16}
    assert why_not(random_config("k3", **sizes), (9, 0)) is None
    odd = random_config("k3", **sizes, moe_intermediate_size=36)
    assert "multiples of 8" in str(why_not(odd, (9, 0)))
