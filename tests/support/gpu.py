"""What tests that need a GPU share: the reason to skip, and memory full of NaN where kernels get theirs."""

from typing import Final

import pytest
import torch

POISON: Final = 0x7FC07FC0
"""NaN as fp32 and as a pair of bf16; as an integer gate, more than any sum of gates."""
FREE_BYTES: Final = (*(1 << 18,) * 8, *(1 << 20,) * 8, *(6 << 20,) * 8, *(32 << 20,) * 4, 128 << 20)


def require_gpu() -> None:
    """Skips the module that calls it, before it imports a kernel: without a GPU other tests interpret them."""
    pytest.importorskip("triton", reason="triton is not installed")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device", allow_module_level=True)


def poison_free_memory(device: torch.device) -> None:
    """Leave NaN in the blocks that torch will hand out next: what a kernel doesn't write shows itself."""
    blocks = [torch.full((size // 4,), POISON, dtype=torch.int32, device=device) for size in FREE_BYTES]
    torch.cuda.synchronize(device)
    del blocks
