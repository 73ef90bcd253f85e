"""What the compiler makes of attention for sm_90, without a GPU: wgmma, TMA, registers, no spills, no atomics."""

from typing import Final

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch

from forkpoint.kernels.mla.triton import launch as mla
from tests.support.triton_compile import Probe, Report, reports

KERNELS: Final = "forkpoint.kernels.mla.triton."
PARTIAL: Final = {"partial": "*fp32", "maxima": "*fp32", "sums": "*fp32"}
SHARED_BYTES_MAX: Final = 232_448
"""What one program may have on an H100 or H200."""
FILE_REGISTERS: Final = 65_536
PAGE_BYTES: Final = 64 * 576 * 2


def box(columns: int) -> str:
    """A TMA descriptor of 64 rows as tma.py makes it."""
    layout = "swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, fp4_padded=False, cga_layout=[]"
    return f"tensordesc<bf16[64,{columns}],NVMMASharedLayout({layout})>"


def hopper(heads: int) -> Probe:
    types = {"q_wide": box(128), "q_thin": box(64), "page_wide": box(128), "page_thin": box(64), "tables": "*i32"}
    types |= {"records": "*i32", "items": "i32", "scale": "fp32", "page_rows": "i32"} | PARTIAL
    unaligned = ("items", "page_rows")
    return Probe(
        f"hopper {heads}", KERNELS + "hopper:hopper_kernel", types, {"HEADS": heads}, mla.HOPPER_WARPS, 3, unaligned
    )


def split(shape: mla.Shape) -> Probe:
    """The general split kernel with K3's and Kimi Linear's latents: 512 + 64."""
    types = {"q": "*bf16", "pages": "*bf16", "tables": "*i32", "records": "*i32", "scale": "fp32", "page_stride": "i64"}
    constants = {"HEADS": 96, "R": 512, "DR": 64, "BLOCK": shape.rows, "PAGE": 64}
    return Probe("split", KERNELS + "split:split_kernel", types | PARTIAL, constants, shape.warps, shape.stages)


SPLIT: Final = split(mla.SHAPES[torch.bfloat16])
COMBINE: Final = Probe(
    "combine",
    KERNELS + "split:combine_kernel",
    PARTIAL | {"blocks": "*i32", "out": "*fp32"},
    {"R": 512, "BLOCK": 64, "LANES": mla.COMBINE.rows, "COLUMNS": mla.COMBINE.columns},
    mla.COMBINE.warps,
)
WRITE: Final = Probe(
    "write",
    KERNELS + "split:write_kernel",
    {"latents": "*bf16", "pages": "*bf16", "places": "*i32", "page_stride": "i64", "width": "i32"},
    {"PAGE": 64, "BLOCK": 1024},
    1,
)
PROBES: Final = [hopper(96), hopper(32), SPLIT, COMBINE, WRITE]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Every probe compiled once; kernels that did not change come from pytest's cache."""
    cache = getattr(request.config, "cache", None)
    return reports(PROBES, tmp_path_factory.mktemp("triton") if cache is None else cache.mkdir("triton"))


def test_no_kernel_spills_or_uses_atomics_and_all_fit_a_multiprocessor(compiled: dict[str, Report]) -> None:
    assert len(compiled) == len(PROBES)
    for report in compiled.values():
        assert report.spill_bytes == report.atomics == 0, report
        assert 0 <= report.shared_bytes <= SHARED_BYTES_MAX, report


@pytest.mark.parametrize("heads", [32, 96])
def test_every_product_of_hopper_is_wgmma_and_every_page_comes_by_tma(heads: int, compiled: dict[str, Report]) -> None:
    report = compiled[hopper(heads).name]
    scores, values, sums = 4 * 8 + 4, 2 * 2 * 4, 4  # 16 columns of k a product
    assert (report.wgmma, report.mma) == (2 * (scores + values + sums), 0)  # pages go in pairs
    queries, pages = 5, 2 * 2 + 1
    assert report.tma == 2 * queries + (2 + 2) * pages
    assert report.fp32_fma == 0


@pytest.mark.parametrize("heads", [32, 96])
def test_two_warp_groups_of_hopper_share_the_register_file(heads: int, compiled: dict[str, Report]) -> None:
    report = compiled[hopper(heads).name]
    assert report.registers * 2 * 128 <= FILE_REGISTERS
    assert report.shared_bytes > 3 * PAGE_BYTES  # q and two pages


def test_the_general_kernel_is_all_wgmma_and_keeps_a_page_in_flight(compiled: dict[str, Report]) -> None:
    """A page number that is read in the step that needs it would leave one page in flight at any number of stages."""
    assert compiled["split"].wgmma > 0 == compiled["split"].mma
    assert compiled["split"].shared_bytes > 2 * PAGE_BYTES


def test_the_fold_fuses_no_multiply_with_an_add(compiled: dict[str, Report]) -> None:
    """A fused multiply-add rounds once, so a compiler that fuses in one kernel and not in its twin parts their bits."""
    assert compiled["combine"].fp32_fma == 0
