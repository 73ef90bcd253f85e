"""What a step must move through the device's memory at the least, and how fast that memory is.

Weights that every row meets are read once; of routed experts those that the step's rows chose, counted in a step like
it; S once, and its new value written each time a tile closes; half an open tile's rows; the latents of the past. Rows,
logits and everything that a kernel writes for the next one are left out: they stay far below or in the caches.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor

from forkpoint.kernels.router.routes import Router, Routes
from forkpoint.limits import TILE_TOKENS
from forkpoint.model.inventory import QUANTISED_SUFFIXES, kept_dtype
from forkpoint.model.kernels import Kernels
from forkpoint.model.layout import StateLayout
from forkpoint.model.loading import LoadedModel
from forkpoint.model.moe import SparseMoe
from forkpoint.model.weight_sizes import EMBEDDING, HEAD, ROUTED, weight_sizes

COPY_BYTES: Final = {"cuda": 4 << 30, "cpu": 256 << 20}
COPIES: Final = 12
"""The fastest of so many is the device's rate: a floor is what could be reached."""


def copy_rate(device: torch.device) -> float:
    """Bytes a second, read and written, of a copy within the device's memory."""
    source = torch.zeros(COPY_BYTES[device.type] // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(COPIES):
        synchronize(device)
        began = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = min(best, time.perf_counter() - began)
    return 2 * source.nbytes / best


def synchronize(device: torch.device) -> None:
    """Wait for what the device was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class RouteCount:
    """Experts that steps read, a layer and step each: those that at least one row chose."""

    experts: int = 0


class _CountedKernels:
    """The kernels of a model, which count what they route. Slower: the device is asked for each layer's routes."""

    def __init__(self, kernels: Kernels, count: RouteCount) -> None:
        self._kernels, self._count = kernels, count

    def __getattr__(self, name: str) -> object:
        return getattr(self._kernels, name)

    def route(self, x: Tensor, router: Router) -> Routes:
        routes = self._kernels.route(x, router)
        self._count.experts += int(torch.unique(routes.experts).numel())
        return routes


def sparse_blocks(model: LoadedModel) -> list[SparseMoe]:
    """The blocks with experts of all layers."""
    return [layer.ffn for layer in model.decoder.layers if isinstance(layer.ffn, SparseMoe)]


@contextmanager
def counted_routes(model: LoadedModel) -> Iterator[RouteCount]:
    """Counts, while it is open, the experts that the model's steps read; none of them is a replay."""
    count = RouteCount()
    replayed, model.decoder.replay = model.decoder.replay, False
    blocks = sparse_blocks(model)
    before = [block.kernels for block in blocks]
    for block in blocks:
        block.kernels = cast(Kernels, _CountedKernels(block.kernels, count))
    try:
        yield count
    finally:
        for block, kernels in zip(blocks, before, strict=True):
            block.kernels = kernels
        model.decoder.replay = replayed


class StepFloor:
    """Bytes that steps of one model move. `kept_dtype` tells what a GPU's kernels keep; plain torch keeps fp32."""

    def __init__(self, model: LoadedModel) -> None:
        packed = any(block.experts.gate_up.scales is not None for block in sparse_blocks(model))
        config, on_gpu = model.config, model.decoder.kernels.compute_dtype == torch.bfloat16
        self.sizes = weight_sizes(config, packed, kept_dtype if on_gpu else _kept_plainly)
        by_kind = {group.kind: group.nbytes for group in self.sizes.groups}
        self.head = by_kind[EMBEDDING] if config.tie_word_embeddings else by_kind[HEAD]
        self.common = sum(count for kind, count in by_kind.items() if kind not in (EMBEDDING, HEAD, ROUTED))
        self.moe_layers = len(sparse_blocks(model))
        self.expert = 0 if config.moe is None else by_kind[ROUTED] // (self.moe_layers * config.moe.experts)
        self._layout: StateLayout = model.layout

    def decode(self, sequences: int, context: int, experts: int) -> int:
        """One token of each of `sequences` at `context` tokens, whose rows chose `experts` experts in all layers."""
        slot = {name: spec.nbytes for name, spec in self._layout.slot_tensors.items()}
        opened = sum(count for name, count in slot.items() if name.startswith("open_"))
        state = slot["S"] + slot["S"] // TILE_TOKENS + opened // 2 + self._latents(context)
        return self.common + self.head + experts * self.expert + sequences * state

    def prefill(self, tokens: int, chunk: int, experts: int) -> int:
        """One sequence of `tokens` from the start in chunks, which chose `experts` experts in all layers and chunks;
        S is read and written once a chunk, and the latents of all before it are read."""
        starts = range(0, tokens, chunk)
        state = 2 * self._layout.slot_tensors["S"].nbytes
        past = sum(self._latents(start) for start in starts)
        return len(starts) * (self.common + state) + self.head + experts * self.expert + past

    def _latents(self, tokens: int) -> int:
        return self._layout.latent_bytes_per_token() * tokens


def _kept_plainly(name: str, shape: object) -> str:
    return "uint8" if name.endswith(QUANTISED_SUFFIXES) else "float32"
