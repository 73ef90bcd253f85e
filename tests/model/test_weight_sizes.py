"""Parameters and bytes of published models, and that a decoder keeps exactly the bytes that are told."""

import pytest
import torch
from torch import Tensor

from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.device_fit import DeviceFit
from forkpoint.model.geometries import geometry
from forkpoint.model.inventory import kept_dtype
from forkpoint.model.state import TORCH_DTYPES
from forkpoint.model.torch_kernels import TorchKernels
from forkpoint.model.weight_sizes import weight_sizes
from tests.support.held import held_tensors
from tests.support.random_model import Kind, random_model


@pytest.mark.parametrize(
    ("name", "billions", "active", "bare"),
    [("kimi-linear", 49.12, 3.48, 3.11), ("k3", 2779.5, 105.4, 104.2)],
)
def test_published_models_have_their_published_parameters(
    name: str, billions: float, active: float, bare: float
) -> None:
    sizes = weight_sizes(geometry(name), packed=name == "k3")
    digits = 2 if name == "kimi-linear" else 1
    found = (sizes.parameters, sizes.active, sizes.active_without_embedding)
    assert [round(count / 1e9, digits) for count in found] == [billions, active, bare]


class KeptKernels(TorchKernels):
    """Keeps weights as a GPU's kernels do, on a CPU."""

    def weight(self, name: str, tensor: Tensor) -> Tensor:
        return tensor.to(TORCH_DTYPES[kept_dtype(name, tensor.shape)])


@pytest.mark.parametrize("kind", ["kimi-linear", "k3"])
def test_a_decoder_keeps_as_many_bytes_as_are_told(kind: Kind) -> None:
    config, weights = random_model(kind)
    decoder = HybridDecoder(config, weights, kernels=KeptKernels(torch.device("cpu")))
    kept = list(held_tensors(decoder))
    sizes = weight_sizes(config, packed=kind == "k3")
    by_dtype = {name: sum(t.nbytes for t in kept if t.dtype == TORCH_DTYPES[name]) for name in TORCH_DTYPES}
    assert {name: count for name, count in by_dtype.items() if count} == sizes.device_bytes_by_dtype
    assert sizes.device_bytes == sum(tensor.nbytes for tensor in kept)


def test_what_does_not_fit_is_told_to_the_byte() -> None:
    fit = DeviceFit(device=1000, weights=700, session=90, sessions=4)
    assert (fit.needed, fit.short_by, fit.weights_short_by, fit.sessions_that_fit) == (1060, 60, 0, 3)
    assert DeviceFit(device=1060, weights=700, session=90, sessions=4).short_by == 0
    none = DeviceFit(device=600, weights=700, session=90, sessions=1)
    assert (none.weights_short_by, none.short_by, none.sessions_that_fit) == (100, 190, 0)
