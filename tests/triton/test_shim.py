"""The interpreter shim: bf16 as a GPU has it, products whose entries don't depend on their neighbours."""

from types import ModuleType

import numpy as np
import pytest
import torch


def test_bf16_rounds_as_torch_does(kda: ModuleType, device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the shim is for the interpreter")
    shim = __import__("tests.support.triton_shim", fromlist=["narrow"])
    values = torch.cat((torch.randn(4096) * 10.0 ** torch.randint(-38, 38, (4096,)), torch.tensor([0.0, -0.0])))
    values = torch.cat((values, torch.tensor([torch.inf, -torch.inf, 1.0 + 2.0**-8, 1.0 + 3 * 2.0**-8])))
    bits = shim.narrow(values.numpy())
    assert np.array_equal(bits, values.bfloat16().view(torch.int16).numpy().view(np.uint16))
    assert np.array_equal(shim.widen(bits), values.bfloat16().float().numpy())
    assert np.isnan(shim.widen(shim.narrow(np.array([np.nan], dtype=np.float32)))).all()


def test_an_entry_of_a_product_depends_on_its_row_and_column_only(kda: ModuleType, device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("the shim is for the interpreter")
    shim = __import__("tests.support.triton_shim", fromlist=["product"])
    a, b = torch.randn(64, 128).numpy(), torch.randn(128, 32).numpy()
    whole = shim.product(a, b)
    assert np.array_equal(shim.product(a[16:32], b[:, 8:24]), whole[16:32, 8:24])
    poisoned = a.copy()
    poisoned[0] = np.nan
    assert np.array_equal(shim.product(poisoned, b)[1:], whole[1:])
    assert np.allclose(whole, a.astype(np.float64) @ b.astype(np.float64))
