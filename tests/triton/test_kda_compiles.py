"""What the compiler makes of the KDA kernels for sm_90, without a GPU: registers, spills, kinds of product."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SERIAL = ("hopper_recur_kernel", "recur_kernel")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Every kernel at its pinned shapes, compiled in a process of its own: this one may interpret them."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton==3.6.0 (640 MB, so not among the test packages)")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")))
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    call = [sys.executable, "-m", "tests.support.kda_compile"]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_pinned_kernel_uses_an_atomic_or_spills_where_each_step_comes_by(kernels: list[dict[str, Any]]) -> None:
    """read_kernel over a pool of bf16 gives up registers that only a closing tile needs, one step in sixteen."""
    assert {kernel["kernel"] for kernel in kernels} == {
        *("values_kernel", "prepare_kernel", "hopper_recur_kernel", "recur_kernel", "keep_kernel"),
        *("step_kernel", "read_kernel"),
    }
    for kernel in kernels:
        assert kernel["spill_bytes"] == 0 or (kernel["shape"] == "BV=64 bf16" and kernel["spill_bytes"] < 128), kernel
        assert kernel["atomics"] == 0, kernel
        assert 0 < kernel["registers"] <= 255, kernel


def test_no_sum_is_fused_with_a_product(kernels: list[dict[str, Any]]) -> None:
    """Else a function might round differently in each kernel that inlines it.

    The conv asks for it, four times a channel, and a bounded gate once; the library's log2 does too, in fma.rn.ftz,
    which this does not count.
    """
    for kernel in kernels:
        if kernel["kernel"] in SERIAL or kernel["kernel"] in ("read_kernel", "keep_kernel"):
            assert kernel["fused"] == 0, kernel
        else:
            each = max(128 // (32 * kernel["warps"]), 1)
            of_conv = {"values_kernel": 4, "prepare_kernel": 8, "step_kernel": 12}[kernel["kernel"]]
            a_row = each * (of_conv + (kernel["shape"] == "TWO=False"))
            assert kernel["fused"] > 0 and kernel["fused"] % a_row == 0, kernel


def test_products_with_the_state_are_wgmma_and_a_tiles_own_are_not(kernels: list[dict[str, Any]]) -> None:
    for kernel in kernels:
        name = kernel["kernel"]
        if name in SERIAL or name == "read_kernel":
            assert kernel["wgmma"] > 0 and kernel["mma"] == 0 and kernel["serialised"] == 0, kernel
        elif name in ("values_kernel", "keep_kernel"):
            assert kernel["wgmma"] == kernel["mma"] == 0, kernel
        else:
            assert kernel["wgmma"] == 0 and kernel["mma"] > 0, kernel


def test_the_serial_pass_loads_ahead(kernels: list[dict[str, Any]]) -> None:
    for name in SERIAL:
        (recur,) = [kernel for kernel in kernels if kernel["kernel"] == name]
        assert recur["async_copies"] > 0
        # Two programs must fit a multiprocessor, or half of its time nothing hides the waits.
        assert recur["shared_bytes"] <= 113 * 1024 and recur["registers"] * recur["warps"] * 32 <= 32 * 1024


def test_decode_leaves_room_for_many_reads_of_the_state(kernels: list[dict[str, Any]]) -> None:
    fp32, bf16 = [kernel for kernel in kernels if kernel["kernel"] == "read_kernel"]
    for read, programs in ((fp32, 4), (bf16, 5)):
        assert (read["shared_bytes"] + 1024) * programs <= 228 * 1024, read
        assert read["registers"] * read["warps"] * 32 * programs <= 64 * 1024, read


def test_a_decode_step_waits_for_memory_as_few_times_as_it_can(kernels: list[dict[str, Any]]) -> None:
    """The reading kernel sends for S, factors and matrices before it waits for any; the other one loads all its inputs
    before it stores anything."""
    for kernel in kernels:
        if kernel["kernel"] == "read_kernel":
            assert kernel["late_loads"] == 0, kernel
        if kernel["kernel"] == "step_kernel":
            assert kernel["loads_behind_stores"] == 0, kernel
