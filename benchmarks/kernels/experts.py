"""Experts of both models, their router, and the mixture of Attention Residuals, beside what the memory allows.

A floor counts the experts that the routes of that batch touch, so it is that batch's own: every weight of them is read
once, every row of x, and what is between the kernels is written and read once.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.run import COPY_BYTES_A_US, FLOP_A_US, OURS, Call, Case, Rows, Run, copies, equal, timed
from benchmarks.record import Measurement
from forkpoint.kernels.attn_res import naive as attn_res_naive
from forkpoint.kernels.attn_res import triton as attn_res
from forkpoint.kernels.experts.triton import launch
from forkpoint.kernels.experts.weights import ExpertMatrix, Experts
from forkpoint.kernels.ffn import triton as ffn
from forkpoint.kernels.ffn.activation import SILU, Activation
from forkpoint.kernels.ffn.naive import glu
from forkpoint.kernels.norm.naive import rms_norm
from forkpoint.kernels.router import triton as router
from forkpoint.kernels.router.routes import Router, Routes

ROWS = (1, 16, 64, 256, 1024, 8192)
SITU = Activation("situ", 4.0, 25.0)
BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-5


@dataclass(frozen=True)
class Layer:
    """Sizes of one layer's experts and their format."""

    name: str
    experts: int
    per_token: int
    hidden: int
    """Width that the router reads."""
    width: int
    """Width that the experts read and write."""
    inner: int
    packed: bool

    def expert_bytes(self) -> float:
        """Of one expert's three matrices."""
        return 3 * self.width * self.inner * (0.5 + 1 / 32 if self.packed else 2)

    def floor(self, routes: Routes) -> float:
        """Microseconds."""
        rows, choices = routes.experts.shape[0], routes.experts.numel()
        used = int(torch.unique(routes.experts).numel())
        between = 2 * choices * (self.inner + self.width)
        moved = used * self.expert_bytes() + 2 * between + 2 * 2 * rows * self.width
        return max(moved / COPY_BYTES_A_US, 6 * choices * self.width * self.inner / FLOP_A_US)


LAYERS = (
    Layer("kimi-linear", 256, 8, hidden=2304, width=2304, inner=1024, packed=False),
    Layer("k3", 896, 16, hidden=7168, width=3584, inner=3072, packed=True),
)
DRY = tuple(
    Layer(name, 8, 3, hidden=64, width=64, inner=32, packed=packed)
    for name, packed in (("bf16", False), ("mxfp4", True))
)


def weights(run: Run, layer: Layer) -> Experts:
    """Random weights of one layer."""

    def matrix(outputs: int, inputs: int) -> ExpertMatrix:
        shape = (layer.experts, outputs)
        if not layer.packed:
            values = torch.empty((*shape, inputs), dtype=BF16, device=run.device)
            return ExpertMatrix(values.normal_(std=inputs**-0.5))
        values = torch.randint(0, 256, (*shape, inputs // 2), dtype=torch.uint8, device=run.device)
        scales = torch.randint(118, 123, (*shape, inputs // 32), dtype=torch.uint8, device=run.device)
        return ExpertMatrix(values, scales)

    return Experts(matrix(2 * layer.inner, layer.width), matrix(layer.width, layer.inner))


def routes_of(run: Run, layer: Layer, rows: int) -> Routes:
    """Uniform choices: as many different experts as a batch can have."""
    scores = torch.rand((rows, layer.experts), device=run.device)
    experts = scores.topk(layer.per_token, dim=1).indices.sort(dim=1).values
    return Routes(experts, torch.rand((rows, layer.per_token), device=run.device))


def some(routes: Routes, rows: int) -> Routes:
    return Routes(routes.experts[:rows].contiguous(), routes.weights[:rows].contiguous())


def experts(run: Run, layer: Layer) -> Rows:
    """A row alone against the same row in batches that take other tiles, then times.

    Rows take turns over several routes, so that a batch of few rows finds its experts in memory, not in the cache.
    """
    held, activation = weights(run, layer), SITU if layer.packed else SILU
    sizes = (1, 17) if run.dry else ROWS
    x, shared, most = run.random(max(sizes), layer.width), run.random(max(sizes), layer.width), max(sizes)
    routes = routes_of(run, layer, most)
    case = f"experts {layer.name} {layer.experts}x{layer.per_token} {layer.width}->{layer.inner}"

    def rows_of(count: int, each: Routes) -> Tensor:
        return launch.experts_sum(x[:count], some(each, count), held, activation, shared[:count])

    alone = rows_of(1, routes)
    same = equal(case, "row alone equals its batch", [(alone, rows_of(n, routes)[:1]) for n in sizes])
    yield same
    if not same.value:
        return
    for count in sizes:
        touched = min(count * layer.per_token, layer.experts) * layer.expert_bytes()
        turns = [routes_of(run, layer, count) for _ in range(1 if run.dry else min(16, copies(touched)))]
        ours: list[Call] = [
            partial(launch.experts_sum, x[:count], each, held, activation, shared[:count]) for each in turns
        ]
        floor = sum(map(layer.floor, turns)) / len(turns)
        yield timed(f"{case} R {count}", "a layer", run.compare({OURS: ours})[OURS], floor=floor)
        for name, microseconds in run.kernels(ours[0]).items():
            yield Measurement(f"{case} R {count}", name, "us", microseconds)


def route(run: Run, layer: Layer) -> Rows:
    """Logits and the choice."""
    gate = Router(
        run.random(layer.experts, layer.hidden), run.random(layer.experts, dtype=FP32), layer.per_token, True, 2.446
    )
    sizes = (1, 17) if run.dry else ROWS
    x = run.random(max(sizes), layer.hidden)
    case = f"router {layer.name} {layer.experts}x{layer.per_token}"
    alone = router.route(x[:1], gate)
    pairs = [(alone.weights, router.route(x[:n], gate).weights[:1]) for n in sizes]
    yield equal(case, "row alone equals its batch", pairs)
    for count in sizes:
        moved = 2 * layer.hidden * (count + layer.experts) + count * (4 * layer.experts + 12 * layer.per_token)
        ours: list[Call] = [partial(router.route, x[:count], gate)]
        yield timed(f"{case} R {count}", "time", run.compare({OURS: ours})[OURS], floor=moved / COPY_BYTES_A_US)


def mix(run: Run, sources: int) -> Rows:
    """Sum, mixture and norm at K3's width, fp32 residuals."""
    width, sizes = (128, (1, 5)) if run.dry else (7168, ROWS)
    most = max(sizes)
    bank, x = run.random(sources, most, width, dtype=FP32), run.random(most, width, dtype=FP32)
    delta, key, weight = run.random(most, width), run.random(width, dtype=FP32), run.random(width, dtype=FP32)
    case = f"mix of {sources} + 1 x {width}"

    def ours(count: int) -> tuple[Tensor, Tensor]:
        return attn_res.mix_norm(bank[:, :count], x[:count], delta[:count], key, weight, EPS, BF16)

    def theirs(count: int) -> Tensor:
        return rms_norm(attn_res_naive.mix(bank[:, :count], x[:count] + delta[:count], key, EPS), weight, EPS)

    alone = ours(1)[1]
    yield equal(case, "row alone equals its batch", [(alone, ours(n)[1][:1]) for n in sizes])
    for count in sizes:
        moved = count * width * (4 * (sources + 2) + 2 * 2)
        found = run.compare({OURS: [partial(ours, count)], "torch": [partial(theirs, count)]})
        yield timed(f"{case} R {count}", "time", found[OURS], ("torch", found.get("torch")), moved / COPY_BYTES_A_US)


def situ(run: Run) -> Rows:
    """Both halves of one product, at the width of K3's shared block."""
    rows, width = (4, 128) if run.dry else (8192, 6144)
    both = run.random(rows, 2 * width)
    gate, up = both[:, :width], both[:, width:]
    found = run.compare({OURS: [partial(ffn.glu, gate, up, SITU)], "torch": [partial(glu, gate, up, SITU)]})
    floor = 6 * rows * width / COPY_BYTES_A_US
    yield timed(f"situ {rows} x {width}", "time", found[OURS], ("torch", found.get("torch")), floor)


def cases(run: Run) -> list[Case]:
    """Both models' layers. K3's takes 16 GB."""
    layers = DRY if run.dry else LAYERS
    found: list[Case] = [(f"experts {layer.name}", partial(experts, run, layer)) for layer in layers]
    found += [(f"router {layer.name}", partial(route, run, layer)) for layer in layers]
    found += [(f"mix {sources}", partial(mix, run, sources)) for sources in ((2,) if run.dry else (1, 4, 8))]
    return [*found, ("situ", partial(situ, run))]
