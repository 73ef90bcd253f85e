"""What the compiler makes of the staging kernels for sm_90, without a GPU: 16 bytes a thread and access, no spills."""

from typing import Final

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from forkpoint.kernels.staging import triton as staging
from tests.support.triton_compile import Probe, Report, reports

KERNELS: Final = "forkpoint.kernels.staging.triton:"
MODES: Final = {"gather": staging.GATHER, "scatter": staging.SCATTER, "move": staging.MOVE}


def copy(name: str) -> Probe:
    """A copy in whole units."""
    types = {"base": "*i32", "buffer": "*i32", "table": "*i64", "sources": "*i64", "targets": "*i64"}
    types |= {"source": "i32", "target": "i32", "rows": "i32"}
    constants = {"UNIT": 4, "BLOCK": staging.COPY.block // 4, "MODE": MODES[name].value, "EVICT": staging.COPY.evict}
    unaligned = ("source", "target", "rows")
    return Probe(name, KERNELS + "copy_kernel", types, constants, staging.COPY.warps, unaligned=unaligned)


def planes(direction: str, item: int) -> Probe:
    """fp32's four planes, bf16's two."""
    types = {"items": f"*i{8 * item}", "planes": "*u8", "count": "i32", "row_stride": "i32", "plane_stride": "i32"}
    constants = {"ITEM": item, "BLOCK": staging.PLANES.block}
    return Probe(f"{direction} {item}", f"{KERNELS}{direction}_kernel", types, constants, staging.PLANES.warps)


COPIES: Final = [copy(name) for name in MODES]
PLANES: Final = [planes(direction, item) for direction in ("split", "join") for item in (4, 2)]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Report]:
    """Every probe compiled once; kernels that did not change come from pytest's cache."""
    cache = getattr(request.config, "cache", None)
    return reports(COPIES + PLANES, tmp_path_factory.mktemp("triton") if cache is None else cache.mkdir("triton"))


def test_no_copy_spills_or_has_an_atomic(compiled: dict[str, Report]) -> None:
    assert len(compiled) == len(COPIES + PLANES)
    for report in compiled.values():
        assert report.spill_bytes == report.atomics == 0, report


def test_copies_move_16_bytes_an_access_without_shared_memory(compiled: dict[str, Report]) -> None:
    """The narrow accesses are the row of the table and the places."""
    for probe in COPIES:
        report = compiled[probe.name]
        per_thread = staging.COPY.block // (32 * staging.COPY.warps) // 16
        assert report.wide == 2 * per_thread and report.shared_bytes == 0, report
        assert report.narrow == 6, report


def test_planes_are_read_and_written_16_bytes_an_access(compiled: dict[str, Report]) -> None:
    for probe in PLANES:
        item, report = probe.constants["ITEM"], compiled[probe.name]
        per_thread = staging.PLANES.block // (32 * staging.PLANES.warps) * item // 16
        assert report.wide == 2 * per_thread and report.narrow == 0, report
