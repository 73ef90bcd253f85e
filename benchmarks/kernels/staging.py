"""A session's fixed-size state to one buffer and back, beside torch's copy of as many bytes."""

from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.run import COPY_BYTES_A_US, OURS, Call, Case, Rows, Run, equal, timed
from forkpoint.kernels.staging import naive
from forkpoint.kernels.staging import triton as staging
from forkpoint.kernels.staging.pieces import Piece, build_table

MODELS = {"k3": (69, 96), "kimi-linear": (20, 32)}
"""KDA layers, heads."""
SHARE = 0.9
"""Of the bandwidth of a device copy: the target."""


def pools(run: Run, layers: int, heads: int, pool: torch.dtype) -> tuple[Tensor, Tensor]:
    """S and the conv's grid tails of three slots, layer by layer."""
    width = 4 if run.dry else 128
    states = run.random(layers, 3, heads, width, width).to(pool)
    return states, run.random(layers, 3, 3, 3 * heads * width)


def times(run: Run, model: str, pool: torch.dtype) -> Rows:
    """Gather, scatter, a copy from slot to slot, and the split of S into byte planes."""
    layers, heads = (2, 2) if run.dry else MODELS[model]
    case = f"staging {model} {str(pool).removeprefix('torch.')}"
    states, tails = pools(run, layers, heads, pool)
    parts = [
        [Piece(tensor[layer, 0], tensor.stride(1) * tensor.element_size())]
        for layer in range(layers)
        for tensor in (states, tails)
    ]
    table = build_table(parts)
    buffer, definition = (torch.zeros(table.nbytes, dtype=torch.uint8, device=run.device) for _ in range(2))
    source, target = (torch.tensor([n], dtype=torch.int64, device=run.device) for n in (1, 2))
    staging.gather(table, buffer, source)
    staging.scatter(table, buffer, target)
    naive.gather(table, definition, [1])
    same = equal(
        case,
        "bytes of the definition",
        [(buffer, definition), (states[:, 1], states[:, 2]), (tails[:, 1], tails[:, 2])],
    )
    yield same
    if not same.value:
        return
    other = torch.empty_like(buffer)
    planes = torch.empty((pool.itemsize, states[:, 1].numel()), dtype=torch.uint8, device=run.device)
    contenders: dict[str, list[Call]] = {
        OURS: [partial(staging.gather, table, buffer, source)],
        "device copy": [partial(other.copy_, buffer)],
        "scatter": [partial(staging.scatter, table, buffer, target)],
        "slot to slot": [partial(staging.move, table, source, target)],
        "byte planes": [partial(staging.split_planes, states[:, 1].flatten(1), planes)],
    }
    found = run.compare(contenders)
    copy = found["device copy"]
    floor = 2 * table.nbytes / COPY_BYTES_A_US
    yield timed(case, "gather", found[OURS], ("device copy", copy), floor, copy.p50 / SHARE)
    for name in ("scatter", "slot to slot", "byte planes"):
        if name in found:
            yield timed(case, name, found[name], ("device copy", copy), floor, copy.p50 / SHARE)


def cases(run: Run) -> list[Case]:
    """Both models' slots."""
    return [
        ("staging k3", partial(times, run, "k3", torch.float32)),
        ("staging k3 bf16", partial(times, run, "k3", torch.bfloat16)),
        ("staging kimi-linear", partial(times, run, "kimi-linear", torch.float32)),
    ]
