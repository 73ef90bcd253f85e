"""What the compiler makes of the kernels for sm_90, no GPU needed: spills, tensor cores, shared memory, atomics."""

from types import ModuleType
from typing import Final

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.filters import triton as filters
from forkpoint.kernels.matmul.configs import (
    BLOCK_K,
    BLOCK_K_FP32,
    FP32,
    HEAD_TILES,
    SHARED_BYTES_MAX,
    HeadTile,
    Tile,
    every_tile,
)
from forkpoint.kernels.norm import triton as norm
from forkpoint.kernels.pieces.configs import PieceTile, every_piece_tile
from forkpoint.kernels.pieces.triton import GROUP
from forkpoint.kernels.sampler import triton as sampler
from forkpoint.kernels.threshold import triton as threshold
from tests.support.triton_compile import Probe, Report, reports

KERNELS: Final = "forkpoint.kernels."


def product(tile: Tile, dtype: str) -> Probe:
    """The row-invariant product with one tile."""
    constants: dict[str, int | bool] = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "GROUP": tile.group}
    constants["BLOCK_K"] = BLOCK_K if dtype == "bf16" else BLOCK_K_FP32
    types = {"rows": "i32", "outputs": "i32", "inputs": "i32", "out_stride": "i32", "out": "*bf16"}
    if tile.tma or tile.persistent:
        types |= {"x": f"tensordesc<bf16[{tile.rows},{BLOCK_K}]>"}
        types |= {"weight": f"tensordesc<bf16[{tile.columns},{BLOCK_K}]>"}
        constants["SWAPPED"] = tile.swapped
        kernel = "matmul.triton:tma_kernel"
    else:
        types |= {"x": f"*{dtype}", "weight": f"*{dtype}", "x_stride": "i32", "weight_stride": "i32"}
        constants |= {"EVEN_K": True, "SWAPPED": tile.swapped, "UNROLL": tile.unroll}
        kernel = "matmul.triton:linear_kernel"
    if tile.persistent:
        part = tile.columns // (2 if tile.tail == 1 else tile.tail)
        types |= {
            "tail_weight": f"tensordesc<bf16[{tile.columns // tile.tail},{BLOCK_K}]>",
            "out": f"tensordesc<bf16[{tile.rows},{tile.columns // 2}]>",
            "tail_out": f"tensordesc<bf16[{tile.rows},{part}]>",
            "whole": "i32",
        }
        types.pop("out_stride")
        constants.pop("SWAPPED")
        constants |= {"PROGRAMS": 132 * tile.occupancy, "TAIL": tile.tail}
        kernel = "matmul.triton:persistent_kernel"
    name = f"linear {dtype} {tile}"
    return Probe(name, KERNELS + kernel, types, constants, tile.warps, tile.stages, unaligned=("rows", "whole"))


def in_pieces(tile: PieceTile) -> Probe:
    """A product in pieces with one tile."""
    types = {"x": f"tensordesc<bf16[{tile.rows},{BLOCK_K}]>", "weight": f"tensordesc<bf16[{tile.columns},{BLOCK_K}]>"}
    types |= dict.fromkeys(("rows", "outputs", "inputs"), "i32") | {"out": "*bf16"}
    constants: dict[str, int | bool] = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": BLOCK_K}
    constants |= {"PIECE": 3072, "PIECES": 3, "GROUP": GROUP}
    if tile.split:
        types, name = types | {"partial": "*fp32"}, "split"
        del types["out"], constants["PIECES"]
        constants |= {"SWAPPED": tile.swapped, "EARLY": True}
    elif tile.tma:
        name = "whole"
        types["extra"] = f"tensordesc<bf16[{tile.extra or tile.columns},{BLOCK_K}]>"
        constants["EXTRA"] = tile.extra
    else:
        name = "pointer"
        types |= {"x": "*bf16", "weight": "*bf16", "x_stride": "i32", "weight_stride": "i32"}
    kernel = f"{KERNELS}pieces.triton:{name}_kernel"
    return Probe(f"pieces {tile}", kernel, types, constants, tile.warps, tile.stages, unaligned=("rows",))


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


SAMPLER_TYPES: Final = {
    **dict.fromkeys(("tops", "counts", "listed"), "*i32"),
    **dict.fromkeys(("logits", "temperature", "top_p", "min_p", "best"), "*fp32"),
    **dict.fromkeys(("top_k", "keys", "mass", "sure", "bounds", "threshold", "seed", "position", "tokens"), "*i64"),
    **dict.fromkeys(("row_stride", "vocabulary", "parts", "programs"), "i32"),
    "logprobs": "*fp64",
}


def sampling(module: ModuleType, name: str, warps: int, **constants: int) -> Probe:
    """One kernel of the sampler, for a vocabulary of 163,840."""
    names = getattr(module, f"{name}_kernel").arg_names
    types = {key: SAMPLER_TYPES[key] for key in names if key in SAMPLER_TYPES}
    constants.setdefault("BLOCK", sampler.BLOCK)
    constants |= {"PARTS": 256} if "PARTS" in names else {}
    constants |= {"GROUP": filters.PARTS_A_PROGRAM} if "GROUP" in names else {}
    constants |= {"BINS": filters.BINS} if "BINS" in names else {}
    constants |= {"PROGRAMS": 64} if "PROGRAMS" in names else {}
    return Probe(name, f"{module.__name__}:{name}_kernel", types, constants, warps)


SAMPLING: Final = [
    sampling(filters, "highest", filters.WARPS),
    sampling(filters, "count", filters.WARPS),
    sampling(filters, "collect", filters.WARPS),
    sampling(threshold, "resolve", threshold.RESOLVE_WARPS, BLOCK=threshold.BLOCK, SHORT=threshold.SHORT),
    sampling(sampler, "survey", filters.WARPS, FILTERED=True),
    sampling(sampler, "draw", 8, FILTERED=True),
]
GLU: Final = [
    Probe(
        f"glu {name}",
        KERNELS + "ffn.triton:glu_kernel",
        dict.fromkeys(("gate", "up", "out"), "*bf16")
        | dict.fromkeys(("gate_stride", "up_stride", "width"), "i32")
        | {"beta": "fp32", "linear_beta": "fp32"},
        {"NAME": name, "CAPPED": True, "BLOCK": 1024},
        4,
    )
    for name in ("silu", "situ", "sigmoid")
]
PRODUCTS: Final = [*(product(tile, "bf16") for tile in every_tile()), product(FP32, "fp32")]
PIECES: Final = [in_pieces(tile) for tile in every_piece_tile()]
NORMS: Final = [row_norm(128, "gated"), row_norm(2304, "add"), row_norm(7168, "add")]
HEADS: Final = [by_head(tile) for tile in HEAD_TILES]
PROBES: Final = [*PRODUCTS, *PIECES, *NORMS, *HEADS, *SAMPLING, *GLU]


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


def test_only_the_samplers_integer_counts_are_atomic(compiled: dict[str, Report]) -> None:
    assert [name for name, report in compiled.items() if report.atomics] == ["count", "collect"]


def test_bf16_products_run_on_tensor_cores_and_tall_tiles_on_wgmma(compiled: dict[str, Report]) -> None:
    for tile in every_tile():
        report = compiled[product(tile, "bf16").name]
        tall = (tile.columns if tile.swapped else tile.rows) >= 64
        assert (report.wgmma > 0, report.mma > 0) == (tall, not tall), report
        assert (report.tma > 0) == (tile.tma or tile.persistent), report


def test_products_in_pieces_run_on_wgmma_and_copy_by_tma_where_they_can(compiled: dict[str, Report]) -> None:
    for tile in every_piece_tile():
        report = compiled[in_pieces(tile).name]
        assert report.wgmma > 0 == report.mma, report
        assert (report.tma > 0) == tile.tma, report


def test_fp32_products_use_no_tensor_core(compiled: dict[str, Report]) -> None:
    report = compiled[product(FP32, "fp32").name]
    assert report.wgmma == report.mma == 0 < report.fp32_fma
