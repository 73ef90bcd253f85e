"""The published form of tensors: names, shapes and dtypes in files, and how they are cut in shards."""

from forkpoint.model.config import ModelConfig
from forkpoint.model.geometry_sizes import GeometrySizes, sized_config
from forkpoint.model.published import StoredTensor, in_shards, stored_tensors

TINY = GeometrySizes(layers=4, hidden=64, heads=3, ffn=32, experts=4, vocab=272)
VISION_BLOCK = 1024 * 3 * 1536 + 1536 * 1024 + 2 * 1024 * 4096 + 2 * 1024
"""Parameters of one of 27: queries, keys and values; output; feed-forward; two norms."""
VISION = 27 * VISION_BLOCK + 3 * 14 * 14 * 1024 + 64 * 64 * 1024 + 1024 + 4096 * 4096 + 4096 * 7168 + 7168
"""And patches, positions, the last norm, the projector with its norm."""
K3_INDEX_TOTAL = 1_560_860_324_864
"""`total_size` of the published index."""


def stored(name: str, sizes: GeometrySizes = TINY, dtype: str = "bfloat16") -> dict[str, StoredTensor]:
    config = ModelConfig.from_dict(sized_config(name, sizes))
    return {tensor.name: tensor for tensor in stored_tensors(config, dtype)}


def test_kimi_linear_is_stored_as_published() -> None:
    found = stored("kimi-linear")
    kda = "model.layers.0.self_attn."
    assert (found[kda + "A_log"].shape, found[kda + "A_log"].dtype) == ((1, 1, 3, 1), "float32")
    assert found[kda + "q_conv1d.weight"].shape == (3 * 128, 1, 4)
    assert found[kda + "g_b_proj.weight"].shape == (3 * 128, 128)
    gate = "model.layers.1.block_sparse_moe.gate."
    assert (found[gate + "e_score_correction_bias"].dtype, found[gate + "weight"].dtype) == ("float32", "bfloat16")
    assert found["model.layers.1.block_sparse_moe.experts.3.w2.weight"].shape == (64, 32)
    assert all(tensor.name == tensor.read_name for tensor in found.values())


def test_k3_is_stored_as_published() -> None:
    found = stored("k3", dtype="float16")
    kda, moe = "language_model.model.layers.0.self_attn.", "language_model.model.layers.1.block_sparse_moe."
    assert (found[kda + "A_log"].shape, found[kda + "A_log"].read_shape) == ((128,), (3,))
    wide = ("A_log", "dt_bias", "q_conv1d.weight", "o_norm.weight")
    assert {found[kda + name].dtype for name in wide} == {"float32"}
    assert found[kda + "g_proj.weight"].dtype == found["language_model.lm_head.weight"].dtype == "float16"
    packed, scale = (found[f"{moe}experts.0.w1.weight_{part}"] for part in ("packed", "scale"))
    assert (packed.shape, packed.dtype) == ((32, 16), "uint8") and (scale.shape, scale.dtype) == ((32, 1), "uint8")
    assert found[moe + "routed_expert_down_proj.weight"].shape == (32, 64)
    assert "language_model.model.layers.3.self_attn.q_a_layernorm.weight" in found


def test_k3_with_its_vision_tower_takes_the_bytes_that_its_published_index_tells() -> None:
    text = sum(tensor.nbytes for tensor in stored("k3", GeometrySizes()).values())
    assert text + 2 * VISION == K3_INDEX_TOTAL


def test_a_log_is_padded_to_the_next_multiple_of_128() -> None:
    sizes = GeometrySizes(layers=4, hidden=64, heads=129, ffn=32, experts=1, vocab=272)
    assert stored("k3", sizes)["language_model.model.layers.0.self_attn.A_log"].shape == (256,)


def test_shards_hold_neighbours_and_a_tensor_too_large_is_alone() -> None:
    tensors = [StoredTensor(f"t{n}", (size,), "uint8", f"t{n}", (size,)) for n, size in enumerate((4, 4, 3, 50, 1, 8))]
    shards = in_shards(tensors, 10)
    assert [[tensor.name for tensor in group] for group in shards.values()] == [
        ["t0", "t1"],
        ["t2"],
        ["t3"],
        ["t4", "t5"],
    ]
    assert list(shards)[1] == "model-00002-of-00004.safetensors"
