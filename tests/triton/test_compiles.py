"""What the compiler makes of the kernels for sm_90, no GPU needed: spills, tensor cores, shared memory, atomics."""

from typing import Final

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.matmul.configs import BLOCK_K, BLOCK_K_FP32, DEFAULT, FP32, SHARED_BYTES_MAX, Tile
from forkpoint.kernels.mla import triton as mla
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


def attention(shape: mla.Shape) -> Probe:
    """The split kernel with K3's and Kimi Linear's latents: 512 + 64."""
    types = {
        "q": "*bf16", "pages": "*bf16", "tables": "*i32", "sequences": "*i64", "items": "*i32", "partial": "*fp32",
        "maxima": "*fp32", "sums": "*fp32", "scale": "fp32", "page_stride": "i64",
    }  # fmt: skip
    constants = {"HEADS": 96, "R": 512, "DR": 64, "BLOCK": shape.rows, "PAGE": 64, "SPLIT": 512}
    kernel = KERNELS + "mla.triton:split_kernel"
    return Probe(f"split {shape.rows} s{shape.stages}", kernel, types, constants, shape.warps, shape.stages)


def row_norm(width: int) -> Probe:
    """A gated norm of one width."""
    types = {"x": "*bf16", "gate": "*bf16", "weight": "*fp32", "out": "*bf16", "row_stride": "i32"}
    types |= {"gate_stride": "i32", "width": "i32", "eps": "fp32"}
    constants = {"MEAN": True, "WEIGHTED": True, "GATED": True, "BLOCK": 1 << (width - 1).bit_length()}
    return Probe(f"norm {width}", KERNELS + "norm.triton:norm_kernel", types, constants, norm.warps(width))


COMBINE: Final = Probe(
    "combine",
    KERNELS + "mla.triton:combine_kernel",
    {"partial": "*fp32", "maxima": "*fp32", "sums": "*fp32", "blocks": "*i32", "sequences": "*i64", "out": "*fp32"},
    {"HEADS": 96, "R": 512, "BLOCK": 64, "LANES": mla.COMBINE_LANES},
    mla.COMBINE_WARPS,
)
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
WRITE: Final = Probe(
    "write",
    KERNELS + "mla.triton:write_kernel",
    {"latents": "*fp32", "pages": "*bf16", "places": "*i64", "page_stride": "i64", "width": "i32"},
    {"PAGE": 64, "BLOCK": 1024},
    1,
)
SWIGLU: Final = Probe(
    "swiglu",
    KERNELS + "ffn.triton:swiglu_kernel",
    {"gate": "*bf16", "up": "*bf16", "out": "*bf16", "gate_stride": "i32", "up_stride": "i32", "width": "i32"},
    {"BLOCK": 1024},
    4,
)
PRODUCTS: Final = [*(product(bucket.tile, "bf16") for bucket in DEFAULT), product(FP32, "fp32")]
SPLITS: Final = [attention(shape) for shape in mla.SHAPES]
NORMS: Final = [row_norm(width) for width in (128, 7168)]
PROBES: Final = [*PRODUCTS, *SPLITS, *NORMS, COMBINE, WRITE, SCORE, HISTOGRAM, HIGHEST, DESCEND, SWIGLU]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Every probe compiled once; kernels that did not change come from pytest's cache."""
    cache = request.config.cache
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


def test_attention_of_64_rows_a_block_is_all_wgmma(compiled: dict[str, Report]) -> None:
    for shape in mla.SHAPES:
        report = compiled[attention(shape).name]
        assert (report.wgmma > 0, report.mma > 0) == (shape.rows >= 64, shape.rows < 64), report


def test_attention_holds_two_pages_where_its_shape_says_so(compiled: dict[str, Report]) -> None:
    """A page number that is read in the step that needs it would leave one page in flight at any number of stages."""
    page_bytes = 64 * 576 * 2
    assert all(compiled[name].shared_bytes > 2 * page_bytes for name in ("split 16 s3", "split 32 s3", "split 64 s2"))


def test_elementwise_kernels_fuse_no_multiply_with_an_add(compiled: dict[str, Report]) -> None:
    """A fused multiply-add rounds once, so a compiler that fuses in one kernel and not in its twin parts their bits.
    exp and division expand to fused steps of their own, the same everywhere; the fold has neither."""
    assert compiled["combine"].fp32_fma == 0
