"""Row kernels in Triton on one GPU: equal bits first, then their time beside cuBLAS, torch and the floor.

`python -m benchmarks.rows --out FOLDER` on a machine with an H200; about three minutes, most of it compilation. It
was written without a GPU and has only been interpreted so far (tests/triton/test_rows_benchmark.py, tiny shapes):
expect to correct it on its first run. A case that fails is written as a line of its own, and the next one runs.

Lines with the unit `equal` are 1 or 0; a 0 means that the tiles or blocks compared there must not share a dispatch.
Times are medians over launches with a cold L2; floors come from 4.2 TB/s and 740 TFLOP/s, measured on an H200.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from benchmarks.record import RESULTS, Measurement, commit, write
from forkpoint.kernels.ffn import triton as ffn
from forkpoint.kernels.matmul import triton as matmul
from forkpoint.kernels.matmul.configs import Tile, every_tile, tile_for
from forkpoint.kernels.mla import triton as mla
from forkpoint.kernels.norm import triton as norm
from forkpoint.kernels.sampler import naive
from forkpoint.kernels.sampler import triton as sampler
from forkpoint.kernels.sampler.naive import SamplingRows
from forkpoint.limits import PAGE_TOKENS

BYTES_A_US: Final = 4.2e6
FLOP_A_US: Final = 740e6
Timer = Callable[[Callable[[], object], bool], float]
"""Microseconds of one call; the flag says whether it may be captured in a graph, which hides the host's part."""
CANDIDATES: Final = (
    Tile(16, 32, 4, 6), Tile(16, 64, 4, 6), Tile(16, 128, 4, 4), Tile(64, 32, 4, 6), Tile(64, 128, 4, 4),
    Tile(64, 256, 4, 3), Tile(128, 128, 4, 4), Tile(256, 128, 8, 3, persistent=True),
    Tile(128, 128, 8, 5, persistent=True), Tile(128, 128, 4, 4, persistent=True),
)  # fmt: skip
"""Tiles to time beside the pinned ones."""


@dataclass(frozen=True)
class Scale:
    """Shapes of one run."""

    products: tuple[tuple[int, int], ...] = ((7168, 12288), (12288, 7168), (2304, 4096))
    """(K, N)."""
    rows: tuple[int, ...] = (1, 16, 64, 256, 1024, 8192)
    equal_rows: int = 300
    widths: tuple[int, ...] = (7168, 2304, 128)
    norm_rows: int = 8192
    heads: tuple[int, ...] = (96, 32)
    context: int = 32768
    batches: tuple[int, ...] = (1, 16, 64)
    prompt: int = 512
    tail: int = 40
    latent: tuple[int, int] = (512, 64)
    vocabulary: int = 163_840
    sampled: int = 64
    tiles: tuple[Tile, ...] = tuple(dict.fromkeys((*every_tile(), *CANDIDATES)))


@dataclass(frozen=True)
class Run:
    """Where and how one run measures."""

    device: torch.device
    scale: Scale
    timer: Timer

    def time(self, call: Callable[[], object], captured: bool = True) -> float:
        """Microseconds of one call on the device."""
        return self.timer(call, captured)

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Standard normal numbers."""
        return torch.randn(*shape, device=self.device).to(dtype)


def formed(shape: mla.Shape) -> str:
    return f"{shape.rows} rows w{shape.warps} s{shape.stages}"


Rows = Iterator[Measurement]


def equal(case: str, metric: str, pairs: list[tuple[Tensor, Tensor]]) -> Measurement:
    """1 when every pair has equal numbers."""
    return Measurement(case, metric, "equal", float(all(torch.equal(a, b) for a, b in pairs)))


def off(ours: Tensor, exact: Tensor) -> float:
    """Root mean square of the error over that of the exact numbers."""
    return float((ours.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt())


def named(tile: Tile) -> str:
    form = " persistent" if tile.persistent else ""
    return f"{tile.rows}x{tile.columns} w{tile.warps} s{tile.stages}{form}"


def product_equality(run: Run, inputs: int, outputs: int) -> Rows:
    """Every tile against the smallest one, then single rows against the batch."""
    x, weight = run.random(run.scale.equal_rows, inputs), run.random(outputs, inputs) * inputs**-0.5
    case = f"linear K {inputs} N {outputs}"
    first = matmul.linear(x, weight, tile=Tile(16, 32, 4, 4))
    for tile in run.scale.tiles:
        try:
            other = matmul.linear(x, weight, tile=tile)
            yield equal(case, f"bits of {named(tile)}", [(first, other)])
        except Exception as error:  # noqa: BLE001 - a compiler's, a driver's or torch's: the next case goes on
            yield failed(f"{case} {named(tile)}", error)
    alone = [(matmul.linear(x[row : row + 1], weight), first[row : row + 1]) for row in (0, 17, len(x) - 1)]
    yield equal(case, "row alone", alone)
    exact = x[:16].double() @ weight.double().T
    yield Measurement(case, "rmse to fp64", "ratio", off(first[:16], exact))


def product_times(run: Run, inputs: int, outputs: int) -> Rows:
    """The pinned tile and the fastest one beside cuBLAS, bf16 out."""
    weight = run.random(outputs, inputs)
    for rows in run.scale.rows:
        case = f"linear K {inputs} N {outputs} M {rows}"
        x = run.random(rows, inputs)
        cublas = run.time(partial(torch.nn.functional.linear, x, weight))
        moved = 2 * (rows * inputs + outputs * inputs + rows * outputs)
        floor = max(moved / BYTES_A_US, 2 * rows * inputs * outputs / FLOP_A_US)
        target = cublas * (1.05 if rows <= 64 else 1.10)
        pinned = tile_for(rows, outputs)
        times: dict[Tile, float] = {}
        for tile in dict.fromkeys((pinned, *run.scale.tiles)):
            if (tile.rows > 16 and rows <= 16) or (tile.rows < 64 and rows > 64):
                continue
            try:
                times[tile] = run.time(partial(matmul.linear, x, weight, torch.bfloat16, tile))
            except Exception as error:  # noqa: BLE001 - a compiler's, a driver's or torch's: the next case goes on
                yield failed(f"{case} {named(tile)}", error)
        ranked = sorted(times, key=times.__getitem__)
        for tile, metric in [(pinned, "pinned"), *((tile, "fastest") for tile in ranked[:1])]:
            if tile in times:
                yield Measurement(case, f"{metric}: {named(tile)}", "us", times[tile], "cuBLAS", cublas, floor, target)


def norms(run: Run) -> Rows:
    """Norms and SwiGLU beside their bytes."""
    for width in run.scale.widths:
        x, weight = run.random(run.scale.norm_rows, width), run.random(width, dtype=torch.float32)
        case = f"rms_norm {run.scale.norm_rows} x {width}"
        whole = norm.rms_norm(x, weight, 1e-6)
        yield equal(case, "row alone", [(norm.rms_norm(x[r : r + 1], weight, 1e-6), whole[r : r + 1]) for r in (0, 3)])
        peer = run.time(partial(torch.nn.functional.rms_norm, x, (width,)))
        time = run.time(partial(norm.rms_norm, x, weight, 1e-6))
        yield Measurement(case, "time", "us", time, "torch", peer, 4 * x.numel() / BYTES_A_US)
        time = run.time(partial(norm.gated_rms_norm, x, x, weight, 1e-6))
        yield Measurement(f"gated_{case}", "time", "us", time, floor=4 * x.numel() / BYTES_A_US)
    x = run.random(run.scale.norm_rows, run.scale.widths[0])
    time = run.time(partial(ffn.swiglu, x, x))
    yield Measurement(
        f"swiglu {run.scale.norm_rows} x {x.shape[1]}", "time", "us", time, floor=4 * x.numel() / BYTES_A_US
    )


def attention_equality(run: Run, heads: int) -> Rows:
    """A prompt cut at odd places, alone and packed, and every shape."""
    rank, rope = run.scale.latent
    end = min(run.scale.context, 1100)
    pages = run.random(-(-end // PAGE_TOKENS), PAGE_TOKENS, rank + rope)
    table = list(range(pages.shape[0]))[::-1]
    # Places without a token are poison: a kernel that reads them as numbers gives itself away.
    pages[table[-1], end % PAGE_TOKENS or PAGE_TOKENS :] = torch.nan
    first = end - run.scale.tail
    q = run.random(end - first, heads, rank + rope)
    scale = (rank + rope) ** -0.5

    def attend(spans: list[tuple[int, int]], shape: mla.Shape | None = None) -> Tensor:
        cu_seqlens = [0]
        for a, b in spans:
            cu_seqlens.append(cu_seqlens[-1] + b - a)
        rows = torch.cat([q[a - first : b - first] for a, b in spans])
        starts = [a for a, _ in spans]
        return mla.paged_mla(rows, pages, [table] * len(spans), rank, scale, cu_seqlens, starts, shape)

    case = f"mla H {heads} r {rank}+{rope}"
    whole = attend([(first, end)])
    yield Measurement(case, "finite", "equal", float(whole.isfinite().all()))
    cut = [(first, first + 1), (first + 1, end - 3), (end - 3, end)]
    yield equal(case, "cut alone", [(torch.cat([attend([span]) for span in cut]), whole)])
    yield equal(case, "cut packed", [(attend(cut), whole)])
    for shape in mla.SHAPES:
        yield equal(case, f"bits of {formed(shape)}", [(attend([(first, end)], shape), whole)])
    keys = torch.cat([pages[page] for page in table])[:end].double()
    weights = torch.softmax(q[-1].double() @ keys.T * scale, dim=1)
    exact = weights @ keys[:, :rank]
    yield Measurement(case, "rmse to fp64", "ratio", off(whole[-1], exact))


def attention_times(run: Run, heads: int) -> Rows:
    """Decode at a long context in several batches, then one prompt chunk; each shape on its own line."""
    rank, rope = run.scale.latent
    width, context = rank + rope, run.scale.context
    each = -(-context // PAGE_TOKENS)
    pages = run.random(max(run.scale.batches) * each, PAGE_TOKENS, width)
    tables = [list(range(n * each, (n + 1) * each)) for n in range(max(run.scale.batches))]
    shapes = [(batch, 1) for batch in run.scale.batches] + [(1, min(run.scale.prompt, context))]
    for batch, tokens in shapes:
        q = run.random(batch * tokens, heads, width)
        cu_seqlens = [n * tokens for n in range(batch + 1)]
        flop = 2 * batch * tokens * heads * context * (width + rank)
        floor = max(batch * context * width * 2 / BYTES_A_US, flop / FLOP_A_US)
        for shape in mla.SHAPES:
            pinned = " (pinned)" if shape == mla.shape_for(heads) else ""
            starts = [context - tokens] * batch
            time = run.time(
                partial(mla.paged_mla, q, pages, tables[:batch], rank, width**-0.5, cu_seqlens, starts, shape)
            )
            case = f"mla H {heads} context {context} batch {batch} x {tokens}"
            yield Measurement(case, f"{formed(shape)}{pinned}", "us", time, floor=floor, target=floor / 0.8)


def sampling(run: Run) -> Rows:
    """The sampler beside its torch twin, whose tokens it must draw."""
    batch, vocabulary = run.scale.sampled, run.scale.vocabulary
    logits = (torch.randn(batch, vocabulary, device=run.device) * 3).to(torch.bfloat16).float()
    for name, top_k, top_p in (("no filters", 0, 1.0), ("top-k 50, top-p 0.9", 50, 0.9)):
        rows = SamplingRows(
            temperature=torch.full((batch,), 0.8, device=run.device),
            top_k=torch.full((batch,), top_k, device=run.device),
            top_p=torch.full((batch,), top_p, device=run.device),
            min_p=torch.zeros(batch, device=run.device),
            seed=torch.arange(batch, device=run.device) * 7919,
            position=torch.arange(batch, device=run.device) + 1_000_000,
        )
        case, filtered = f"sample {batch} x {vocabulary}, {name}", top_k > 0
        ours = sampler.sample(logits, rows)
        yield equal(case, "tokens of the twin", [(ours[0], naive.sample(logits, rows)[0])])
        other = sampler.sample(logits, rows, block=1024)
        yield equal(case, "any split", [(ours[0], other[0]), (ours[1], other[1])])
        time = run.time(partial(sampler.sample, logits, rows, filtered))
        peer = run.time(partial(naive.sample, logits, rows), captured=False)
        yield Measurement(case, "time", "us", time, "torch twin", peer, 4 * logits.numel() / BYTES_A_US)


def failed(case: str, error: Exception) -> Measurement:
    """The line of a case that raised."""
    print(f"{case}: {type(error).__name__}: {str(error)[:300]}", file=sys.stderr)
    return Measurement(case, f"failed: {type(error).__name__}", "equal", 0.0)


def measure(run: Run) -> list[Measurement]:
    """All cases, equalities first; one that raises leaves a line and the rest go on."""
    scale = run.scale
    parts: list[tuple[str, Callable[[], Rows]]] = [
        *((f"linear {k} {n}", partial(product_equality, run, k, n)) for k, n in scale.products),
        *((f"mla {heads}", partial(attention_equality, run, heads)) for heads in scale.heads),
        ("sampling", partial(sampling, run)),
        ("norms", partial(norms, run)),
        *((f"mla times {heads}", partial(attention_times, run, heads)) for heads in scale.heads),
        *((f"linear times {k} {n}", partial(product_times, run, k, n)) for k, n in scale.products),
    ]
    rows: list[Measurement] = []
    for name, part in parts:
        try:
            for row in part():  # one by one: what came before an error stays
                rows.append(row)
        except Exception as error:  # noqa: BLE001 - a compiler's, a driver's or torch's: the next case goes on
            rows.append(failed(name, error))
        print(f"{name}: {len(rows)} lines", file=sys.stderr, flush=True)
    return rows


def on_gpu(call: Callable[[], object], captured: bool) -> float:
    """Median microseconds of a call, with a cold L2."""
    from triton.testing import do_bench

    call()  # compiles, and fills the plans' cache
    torch.cuda.synchronize()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        call = graph.replay
    return float(do_bench(call, warmup=5, rep=30, return_mode="median")) * 1e3


def known_commit() -> str:
    """The commit, also where only a copy of the tree is."""
    try:
        return commit()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("FORKPOINT_COMMIT", "unknown")


def main() -> None:
    """Measures everything on the first GPU and writes rows.jsonl."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of rows.jsonl")
    folder = parser.parse_args().out
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.rows needs a GPU")
    torch.manual_seed(0)
    device = torch.device("cuda")
    rows = measure(Run(device, Scale(), on_gpu))
    name = f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    write("rows", rows, on=name, at=known_commit(), folder=folder)


if __name__ == "__main__":
    main()
