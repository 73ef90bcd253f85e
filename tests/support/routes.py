"""Which experts a decoder's rows went to."""

from typing import Any

import torch
from torch import Tensor

from forkpoint.kernels.router.routes import Router, Routes
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.kernels import Kernels
from forkpoint.model.moe import SparseMoe


class _Noted:
    """Kernels that note what they route."""

    def __init__(self, kernels: Kernels, experts: list[Tensor]) -> None:
        self._kernels, self._experts = kernels, experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def route(self, x: Tensor, router: Router) -> Routes:
        routes = self._kernels.route(x, router)
        self._experts.append(routes.experts.cpu())
        return routes


class RecordedRoutes:
    """The experts of every row that the decoder consumes from now on, layer by layer."""

    def __init__(self, decoder: HybridDecoder) -> None:
        self._layers: list[list[Tensor]] = []
        decoder.replay = False  # in a replay nobody is asked
        for layer in decoder.layers:
            if isinstance(layer.ffn, SparseMoe):
                self._layers.append([])
                layer.ffn.kernels = _Noted(layer.ffn.kernels, self._layers[-1])

    def layers(self) -> list[Tensor]:
        """int64 [R, k] of each layer with experts, in the order of the rows."""
        return [torch.cat(batches).long() for batches in self._layers]
