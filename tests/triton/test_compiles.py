"""What the compiler makes of the kernels for sm_90, no GPU needed: spills, tensor cores, shared memory, atomics."""

from typing import Final

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.matmul.configs import (
    BLOCK_K,
    BLOCK_K_FP32,
    DEFAULT,
    FP32,
    HEAD_TILES,
    SHARED_BYTES_MAX,
    HeadTile,
    Tile,
)
from forkpoint.kernels.norm import triton as norm
from forkpoint.kernels.sampler import triton as sampler
from tests.support.triton_compile import Probe, Report, reports

KERNELS: Final = "forkpoint.kernels."


def product(tile: Tile, dtype: str) -> Probe:
    """The row-invariant product with one tile."""
    constants: dict[str, int | bool] = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "GROUP": tile.group}
    types = {"out": "*fp32", "rows": "i32", "outputs": "i32", "inputs": "i32", "out_stride": "i32"}
    name = f"linear {dtype} {tile.rows}x{tile.columns}"
    if tile.persistent:
        types |= {
            "x": f"tensordesc<{dtype}[{tile.rows},{BLOCK_K}]>",
            "weight": f"tensordesc<{dtype}[{tile.columns},{BLOCK_K}]>",
        }
        constants |= {"BLOCK_K": BLOCK_K, "PROGRAMS": 132}
        kernel = "matmul.triton:persistent_kernel"
    else:
        types |= {"x": f"*{dtype}", "weight": f"*{dtype}", "x_stride": "i32", "weight_stride": "i32"}
        constants |= {"BLOCK_K": BLOCK_K if dtype == "bf16" else BLOCK_K_FP32, "EVEN_K": True}
        kernel = "matmul.triton:linear_kernel"
    return Probe(name, KERNELS + kernel, types, constants, tile.warps, tile.stages, unaligned=("rows",))


def row_norm(width: int, kind: str) -> Probe:
    """A norm of one width: gated, or with the residual sum before it."""
    rows, levels, warps = norm.shape_for(width)
    types = dict.fromkeys(("x", "delta", "gate", "total_out", "out"), "*bf16") | {"weight": "*fp32", "eps": "fp32"}
    types |= dict.fromkeys(("rows", "row_stride", "delta_stride", "gate_stride", "width"), "i32")
    constants = {"MEAN": True, "WEIGHTED": True, "GATED": kind == "gated", "ADD": kind == "add"}
    return Probe(
        f"norm {kind} {width}", KERNELS + "norm.triton:norm_kernel", types,
        constants | {"ROWS": rows, "LEVELS": levels}, warps, unaligned=("rows",),
    )  # fmt: skip


def by_head(tile: HeadTile) -> Probe:
    """The product by head, weights with contiguous outputs."""
    types = {"x": "*bf16", "weight": "*bf16", "out": "*bf16"}
    names = ("rows", "inputs", "outputs", "x_row", "x_head", "weight_head", "weight_input", "out_row", "out_head")
    constants = {"weight_output": 1, "BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": BLOCK_K}
    return Probe(
        f"by head {tile.rows}x{tile.columns}", KERNELS + "per_head.triton:per_head_kernel",
        types | dict.fromkeys(names, "i32"), constants, tile.warps, tile.stages, unaligned=("rows",),
    )  # fmt: skip


ROW: Final = {"logits": "*fp32", "tops": "*i32", "inverse": "*fp32", "min_p": "*fp32", "threshold": "*i64"}
SIZES: Final = {"row_stride": "i32", "vocabulary": "i32"}
SCORE: Final = Probe(
    "score",
    KERNELS + "sampler.triton:score_kernel",
    ROW | SIZES | {"seed": "*i64", "position": "*i64", "best": "*i64", "mass": "*i64"},
    {"BLOCK": sampler.BLOCK},
    sampler.WARPS,
)
HISTOGRAM: Final = Probe(
    "histogram",
    KERNELS + "sampler.triton:histogram_kernel",
    ROW | SIZES | {"limit": "*i64", "prefix": "*i64", "histogram": "*i64", "shift": "i32"},
    {"COUNT": False, "BLOCK": sampler.BLOCK},
    sampler.WARPS,
)
HIGHEST: Final = Probe(
    "highest",
    KERNELS + "sampler.triton:highest_kernel",
    SIZES | {"logits": "*bf16", "tops": "*i32"},
    {"BLOCK": sampler.BLOCK},
    sampler.WARPS,
)
DESCEND: Final = Probe(
    "descend",
    KERNELS + "sampler.triton:descend_kernel",
    {"histogram": "*i64", "limit": "*i64", "prefix": "*i64", "above": "*i64"},
    {},
    1,
)
SWIGLU: Final = Probe(
    "swiglu",
    KERNELS + "ffn.triton:swiglu_kernel",
    {"gate": "*bf16", "up": "*bf16", "out": "*bf16", "gate_stride": "i32", "up_stride": "i32", "width": "i32"},
    {"SILU": True, "BLOCK": 1024},
    4,
)
PRODUCTS: Final = [*(product(bucket.tile, "bf16") for bucket in DEFAULT), product(FP32, "fp32")]
NORMS: Final = [row_norm(128, "gated"), row_norm(2304, "add"), row_norm(7168, "add")]
HEADS: Final = [by_head(tile) for tile in HEAD_TILES]
PROBES: Final = [*PRODUCTS, *NORMS, *HEADS, SCORE, HISTOGRAM, HIGHEST, DESCEND, SWIGLU]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Every probe compiled once; kernels that did not change come from pytest's cache."""
    cache = getattr(request.config, "cache", None)
    return reports(PROBES, tmp_path_factory.mktemp("triton") if cache is None else cache.mkdir("triton"))


def test_no_kernel_spills_and_all_fit_a_multiprocessor(compiled: dict[str, Report]) -> None:
    assert len(compiled) == len(PROBES)
    for report in compiled.values():
        assert report.spill_bytes == 0, report
        assert 0 <= report.shared_bytes <= SHARED_BYTES_MAX, report


def test_only_integers_of_the_samplers_histograms_are_added_by_atomics(compiled: dict[str, Report]) -> None:
    assert [name for name, report in compiled.items() if report.atomics] == ["histogram"]


def test_bf16_products_run_on_tensor_cores_and_tall_tiles_on_wgmma(compiled: dict[str, Report]) -> None:
    for bucket in DEFAULT:
        report = compiled[product(bucket.tile, "bf16").name]
        assert (report.wgmma > 0, report.mma > 0) == (bucket.tile.rows >= 64, bucket.tile.rows < 64), report
        assert (report.tma > 0) == bucket.tile.persistent, report


def test_fp32_products_use_no_tensor_core(compiled: dict[str, Report]) -> None:
    report = compiled[product(FP32, "fp32").name]
    assert report.wgmma == report.mma == 0 < report.fp32_fma
