"""What the compiler makes of the experts, the router and the mixture for sm_90, no GPU needed."""

from typing import Any, Final

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.attn_res import triton as attn_res
from forkpoint.kernels.experts.configs import BLOCK_K, BLOCK_K_PACKED, DENSE, PACKED, ExpertTile
from forkpoint.kernels.experts.triton import places
from forkpoint.kernels.matmul.configs import SHARED_BYTES_MAX
from forkpoint.kernels.router import triton as router
from tests.support.triton_compile import Probe, Report, reports

KERNELS: Final = "forkpoint.kernels."
NUMBERS: Final = ("choices", "experts", "inputs", "outputs", "x_stride", "per_token")


def product(kind: str, tile: ExpertTile, packed: bool) -> Probe:
    """One of the two grouped products with one tile."""
    block_k = BLOCK_K_PACKED if packed else BLOCK_K
    box = f"tensordesc<u8[{tile.columns},{block_k // 2}]>" if packed else f"tensordesc<bf16[{tile.columns},{block_k}]>"
    types = dict.fromkeys(NUMBERS if kind == "gate_up" else NUMBERS[:4], "i32")
    types |= dict.fromkeys(("order", "tiles", "used"), "*i32")
    types |= {"x": "*bf16", "values": box, "scales": "*u8" if packed else "*bf16", "out": "*bf16"}
    constants: dict[str, Any] = {"BLOCK_M": tile.rows, "BLOCK_N": tile.columns, "BLOCK_K": block_k}
    constants |= {"SWAPPED": tile.swapped, "PACKED": packed, "EVEN_K": True}
    if kind == "gate_up":
        types |= {"beta": "fp32", "linear_beta": "fp32"}
        constants |= {"NAME": "situ" if packed else "silu", "CAPPED": packed}
    else:
        types["x"] = f"tensordesc<bf16[{tile.rows},{block_k}]>"
    return Probe(
        f"{kind} {'mxfp4' if packed else 'bf16'} {tile}", f"{KERNELS}experts.triton.products:{kind}_kernel", types,
        constants, tile.warps, tile.stages, unaligned=("choices",),
    )  # fmt: skip


def products(packed: bool) -> list[tuple[ExpertTile, Probe]]:
    """Both products with all tiles of one format."""
    tiles = PACKED if packed else DENSE
    found = [(each.gate_up, product("gate_up", each.gate_up, packed)) for each in tiles]
    return found + [(each.down, product("down", each.down, packed)) for each in tiles]


def placing(experts: int, alone: bool) -> Probe:
    types = dict.fromkeys(("counts", "order", "tiles", "used"), "*i32") | {"experts": "*i64"}
    constants = {"EXPERTS": experts, "ROWS": 16, "CHUNK": places.CHUNK, "STEP": places.STEP, "ALONE": alone}
    return Probe(
        f"place {experts} {alone}", KERNELS + "experts.triton.places:place_kernel",
        types | {"assigned": "i32", "chunks": "i32"}, constants | {"FIELDS": places.FIELDS}, places.WARPS,
        unaligned=("assigned", "chunks"),
    )  # fmt: skip


COMBINE: Final = Probe(
    "combine",
    KERNELS + "experts.triton.products:combine_kernel",
    {"y": "*bf16", "shared": "*bf16", "out": "*bf16", "weights": "*fp32", "shared_stride": "i32", "width": "i32"},
    {"PER_TOKEN": 16, "SHARED": True, "BLOCK": 1024},
    4,
)
ROUTE: Final = Probe(
    "route",
    KERNELS + "router.triton:route_kernel",
    {"logits": "*fp32", "bias": "*fp32", "weights": "*fp32", "experts": "*i64", "count": "i32", "scaling": "fp32"},
    {"PER_TOKEN": 16, "NORMALIZE": True, "BIASED": False, "BLOCK": 1024},
    router.WARPS,
)
LEVELS, MIX_WARPS = attn_res.shape_for(7168)
MIX: Final = Probe(
    "mix",
    KERNELS + "attn_res.triton:mix_norm_kernel",
    dict.fromkeys(("bank", "x", "mix", "weight", "total_out"), "*fp32")
    | {"delta": "*bf16", "out": "*bf16", "eps": "fp32"}
    | dict.fromkeys(("sources", "bank_stride", "bank_row", "x_row", "delta_row", "width"), "i32"),
    {"ADD": True, "LEVELS": LEVELS},
    MIX_WARPS,
    unaligned=("sources",),
)
PLACES: Final = [placing(1024, alone=True), placing(1024, alone=False), placing(256, alone=True)]
PRODUCTS: Final = [probe for packed in (False, True) for _, probe in products(packed)]
LARGEST: Final = product("gate_up", PACKED[-1].gate_up, packed=True)
PROBES: Final = [*PRODUCTS, *PLACES, COMBINE, ROUTE, MIX]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Every probe compiled once; kernels that did not change come from pytest's cache."""
    cache = getattr(request.config, "cache", None)
    return reports(PROBES, tmp_path_factory.mktemp("triton") if cache is None else cache.mkdir("triton"))


def test_none_but_the_largest_spills_none_has_atomics_and_all_fit_a_multiprocessor(compiled: dict[str, Report]) -> None:
    assert len(compiled) == len(PROBES)
    for name, report in compiled.items():
        # Two sums of 128 rows beside decoded weights: four registers a thread too many.
        allowed = 16 if name == LARGEST.name else 0
        assert report.spill_bytes <= allowed, report
        assert report.atomics == 0, report
        assert 0 <= report.shared_bytes <= SHARED_BYTES_MAX, report


@pytest.mark.parametrize("packed", [False, True], ids=["bf16", "mxfp4"])
def test_every_grouped_product_is_wgmma_and_its_weights_come_by_tma(packed: bool, compiled: dict[str, Report]) -> None:
    for _, probe in products(packed):
        report = compiled[probe.name]
        assert report.wgmma > 0 == report.mma, report
        assert report.tma > 0, report
