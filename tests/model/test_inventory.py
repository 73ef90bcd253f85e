"""The published models' tensors, by arithmetic alone: names, parameters and bytes against what is published of them."""

import math
from typing import Final

import pytest

from forkpoint.model.geometries import geometry
from forkpoint.model.inventory import PACKED_SUFFIX, SCALE_SUFFIX, expected_tensors

Shapes = dict[str, tuple[int, ...]]

K3_TENSORS: Final = 249_694
"""Tensors of K3's index whose names end in `.weight` or `.weight_packed`."""
K3_BYTES: Final = 1_560_860_324_864
"""`total_size` of K3's index."""
K3_PADDED_HEADS: Final = 128
"""K3 stores `A_log` of its 96 heads so."""
K3_FLOAT32: Final = (".A_log", ".dt_bias", "_conv1d.weight", ".o_norm.weight", ".e_score_correction_bias")


@pytest.fixture(scope="module")
def linear() -> Shapes:
    return expected_tensors(geometry("kimi-linear"))


@pytest.fixture(scope="module")
def k3() -> Shapes:
    return expected_tensors(geometry("k3"), packed=True)


def parameters(shapes: Shapes) -> int:
    """Weights, of which a byte of packed ones holds two; their scales are none."""
    return sum(
        math.prod(shape) * (2 if name.endswith(PACKED_SUFFIX) else 1)
        for name, shape in shapes.items()
        if not name.endswith(SCALE_SUFFIX)
    )


def k3_bytes(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor of K3's text model as published."""
    if name.endswith((PACKED_SUFFIX, SCALE_SUFFIX)):
        return math.prod(shape)
    if name.endswith(".A_log"):
        return 4 * K3_PADDED_HEADS
    return math.prod(shape) * (4 if name.endswith(K3_FLOAT32) else 2)


def k3_vision() -> list[tuple[int, ...]]:
    """Shapes of K3's vision tower and projector."""
    width, heads, inner, merged, text = 1024, 1536, 4096, 4096, 7168
    block = [(width,), (width,), (3 * heads, width), (width, heads), (inner, width), (width, inner)]
    ends = [(width, 3, 14, 14), (64, 64, width), (width,)]
    projector = [(merged, merged), (text, merged), (text,)]
    return [*(block * 27), *ends, *projector]


def test_kimi_linear_has_the_published_tensors_and_parameters(linear: Shapes) -> None:
    assert len(linear) == 20_493
    assert round(parameters(linear) / 1e9, 2) == 49.12


def test_k3_has_the_published_tensors_and_parameters(k3: Shapes) -> None:
    text = [name for name in k3 if name.endswith((".weight", PACKED_SUFFIX))]
    assert len(k3_vision()) == 168
    assert len(text) + len(k3_vision()) == K3_TENSORS
    assert round(parameters(k3) / 1e9, 1) == 2779.5


def test_k3_has_the_bytes_that_its_index_says(k3: Shapes) -> None:
    text = sum(k3_bytes(name, shape) for name, shape in k3.items())
    vision = sum(2 * math.prod(shape) for shape in k3_vision())
    assert (text, vision) == (1_559_965_606_912, 894_717_952)
    assert text + vision == K3_BYTES


def test_an_expert_of_k3_has_the_published_bytes(k3: Shapes) -> None:
    expert = "model.layers.1.block_sparse_moe.experts.895."
    assert sum(k3_bytes(name, shape) for name, shape in k3.items() if name.startswith(expert)) == 17_547_264


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.gate_proj.weight", (33792, 7168)),
        ("model.layers.0.self_attn.g_proj.weight", (12288, 7168)),
        ("model.layers.91.self_attn.g_proj.weight", (12288, 7168)),
        ("model.layers.92.self_attn.q_b_proj.weight", (18432, 1536)),
        ("model.layers.92.self_attn.kv_b_proj.weight", (24576, 512)),
        ("model.layers.92.block_sparse_moe.gate.weight", (896, 7168)),
        ("model.layers.92.block_sparse_moe.routed_expert_down_proj.weight", (3584, 7168)),
        ("model.layers.92.block_sparse_moe.routed_expert_norm.weight", (3584,)),
        ("model.layers.92.block_sparse_moe.shared_experts.down_proj.weight", (7168, 6144)),
        ("model.layers.92.block_sparse_moe.experts.895.w1.weight_packed", (3072, 1792)),
        ("model.layers.92.block_sparse_moe.experts.895.w3.weight_scale", (3072, 112)),
        ("model.layers.92.block_sparse_moe.experts.895.w2.weight_packed", (3584, 1536)),
        ("model.layers.92.block_sparse_moe.experts.895.w2.weight_scale", (3584, 96)),
        ("model.layers.0.self_attention_res_proj.weight", (1, 7168)),
        ("model.output_attn_res_norm.weight", (7168,)),
    ],
)
def test_k3_has_the_published_shapes(k3: Shapes, name: str, shape: tuple[int, ...]) -> None:
    assert k3[name] == shape


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.mlp.gate_proj.weight", (9216, 2304)),
        ("model.layers.0.self_attn.g_a_proj.weight", (128, 2304)),
        ("model.layers.0.self_attn.g_b_proj.weight", (4096, 128)),
        ("model.layers.26.self_attn.q_proj.weight", (6144, 2304)),
        ("model.layers.26.self_attn.kv_a_proj_with_mqa.weight", (576, 2304)),
        ("model.layers.26.block_sparse_moe.gate.e_score_correction_bias", (256,)),
        ("model.layers.26.block_sparse_moe.experts.255.w1.weight", (1024, 2304)),
        ("model.layers.26.block_sparse_moe.shared_experts.down_proj.weight", (2304, 1024)),
    ],
)
def test_kimi_linear_has_the_published_shapes(linear: Shapes, name: str, shape: tuple[int, ...]) -> None:
    assert linear[name] == shape
