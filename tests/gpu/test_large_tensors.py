"""Row kernels and staging on tensors of more than 2^31 values: the last rows are what they are alone."""

import pytest
import torch

from tests.support.gpu import require_gpu

require_gpu()

from forkpoint.kernels.ffn import triton as ffn
from forkpoint.kernels.matmul import triton as matmul
from forkpoint.kernels.norm import triton as norm
from forkpoint.kernels.sampler import triton as sampler
from forkpoint.kernels.sampler.naive import SamplingRows
from forkpoint.kernels.staging import triton as staging
from forkpoint.kernels.staging.pieces import Piece, build_table
from tests.support.kernels import same_bytes

VALUES = 1 << 31
BF16 = torch.bfloat16


def noise(rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """bf16 noise [rows, columns]; the rows before the last hundred repeat the first."""
    few = torch.randn((100, columns), device=device).to(BF16)
    room = torch.empty((rows, columns), dtype=BF16, device=device)
    room[:100], room[-100:] = few, few.flip(0)
    room[100:-100] = few[:1]
    return room


def test_a_product_with_more_than_2_31_outputs(device: torch.device) -> None:
    x, weight = noise(16_500, 128, device), torch.randn((131_072, 128), device=device).to(BF16)
    out = matmul.linear(x, weight, BF16)
    assert out.numel() > VALUES
    assert same_bytes(out[-3:], matmul.linear(x[-3:].clone(), weight, BF16))
    assert same_bytes(out[:2], matmul.linear(x[:2].clone(), weight, BF16))


def test_a_product_with_more_than_2_31_inputs(device: torch.device) -> None:
    x, weight = noise(VALUES // 7168 + 200, 7168, device), torch.randn((64, 7168), device=device).to(BF16)
    out = matmul.linear(x, weight)
    assert same_bytes(out[-5:], matmul.linear(x[-5:].clone(), weight))


@pytest.mark.parametrize("name", ["rms", "gated", "glu"])
def test_rows_beyond_2_31_values(device: torch.device, name: str) -> None:
    x, weight = noise(VALUES // 7168 + 200, 7168, device), torch.randn(7168, device=device)

    def apply(rows: torch.Tensor) -> torch.Tensor:
        if name == "glu":
            return ffn.glu(rows, rows)
        return norm.rms_norm(rows, weight, 1e-5) if name == "rms" else norm.gated_rms_norm(rows, rows, weight, 1e-5)

    out = apply(x)
    assert same_bytes(out[-5:], apply(x[-5:].clone()))


def test_a_token_is_sampled_from_logits_beyond_2_31_values(device: torch.device) -> None:
    rows, vocabulary = VALUES // 163_840 + 200, 163_840
    logits = noise(rows, vocabulary, device)

    def parameters(first: int) -> SamplingRows:
        count = rows - first
        at = torch.arange(first, rows, device=device)
        return SamplingRows(
            temperature=torch.full((count,), 0.8, device=device),
            top_k=torch.full((count,), 50, device=device),
            top_p=torch.full((count,), 0.9, device=device),
            min_p=torch.zeros(count, device=device),
            seed=at * 7919,
            position=at,
        )

    tokens, logprobs = sampler.sample(logits, parameters(0))
    few, theirs = sampler.sample(logits[-6:].clone(), parameters(rows - 6))
    assert torch.equal(tokens[-6:], few) and same_bytes(logprobs[-6:], theirs)


def test_a_slot_of_a_pool_beyond_2_31_values_is_staged_whole_and_alone(device: torch.device) -> None:
    slots = VALUES // (4 * 128 * 128) // 2 + 40
    pool = torch.empty((3, slots, 4, 128, 128), dtype=BF16, device=device)
    near = pool[:, slots - 4 :]
    near.view(torch.int16).random_(-(2**15), 2**15)
    before, step = near.clone(), pool.stride(1) * pool.element_size()
    table = build_table([[Piece(layer[0], step)] for layer in pool])
    buffer = torch.empty(table.nbytes, dtype=torch.uint8, device=device)
    staging.gather(table, buffer, [slots - 2])
    assert same_bytes(buffer, before[:, 2].contiguous().flatten().view(torch.uint8))
    staging.scatter(table, buffer, [slots - 4])
    staging.move(table, [slots - 3], [slots - 1])
    before[:, 0], before[:, 3] = before[:, 2], before[:, 1]
    assert same_bytes(near, before)


def test_byte_planes_beyond_2_31_bytes(device: torch.device) -> None:
    items = torch.empty((3, VALUES // 12 + 16), dtype=torch.int32, device=device)
    items.random_(-(2**31), 2**31 - 1)
    planes = staging.split_planes(items)
    assert planes.numel() > VALUES
    tail = items[2, -4096:].contiguous().view(torch.uint8).view(-1, 4)
    assert torch.equal(planes[:, -4096:], tail.t())
    joined = torch.zeros_like(items)
    staging.join_planes(planes, joined)
    assert torch.equal(joined, items)
