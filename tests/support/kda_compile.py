"""Compiles the Triton KDA kernels for sm_90 without a GPU and prints what came out, one JSON line a kernel.

`python -m tests.support.kda_compile [all]`, in a process where TRITON_INTERPRET is not set. Registers, spills and
shared memory are ptxas's; instructions are counted in PTX.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from forkpoint.kernels.kda.triton.decode import read_kernel, step_kernel
from forkpoint.kernels.kda.triton.hopper import hopper_recur_kernel
from forkpoint.kernels.kda.triton.keep import keep_kernel
from forkpoint.kernels.kda.triton.launch import (
    BF16_REGISTERS,
    HOPPER_VALUES,
    HOPPER_WARPS,
    PINNED,
    Shapes,
)
from forkpoint.kernels.kda.triton.prepare import prepare_kernel, values_kernel
from forkpoint.kernels.kda.triton.recur import recur_kernel

TARGET = GPUTarget("cuda", 90, 32)
INT32 = {"reference_out", "facts", "tiles", "sequences", "total_open", "reference_open", "total_kept", "reference_kept"}
FP32 = {"weight", "A_log", "dt_bias", "beta_open", "decay_in", "decay_out", "checkpoints"}
SCALARS = dict.fromkeys(("x_stride", "z_stride", "b_stride"), "i32") | {"lower_bound": "fp32", "scale": "fp32"}
STRIDES = ("x_stride", "z_stride")
HEADS = 96


@dataclass(frozen=True)
class Compiled:
    """One kernel at one shape."""

    kernel: str
    shape: str
    warps: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int
    mma: int
    fused: int
    """Fused multiply-adds of fp32."""
    async_copies: int
    atomics: int
    barriers: int
    serialised: int
    """Warnings of ptxas that the steps of a wgmma wait for one another."""
    late_loads: int
    """Loads before the first product that lie behind a barrier, and so are sent only when earlier ones are there."""
    loads_behind_stores: int
    """Loads before the first barrier that lie behind a store."""


def _signature(kernel: Any, constants: dict[str, Any], pool: str) -> dict[str, str]:
    types: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in SCALARS:
            types[name] = SCALARS[name]
        elif name == "S":
            types[name] = f"*{pool}"
        else:
            types[name] = "*i32" if name in INT32 else "*fp32" if name in FP32 else "*bf16"
    return types


def _ptxas(ptx: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        call = [str(tool), "-v", "--gpu-name=sm_90a", "-o", str(Path(folder) / "kernel.cubin"), str(source)]
        return subprocess.run(call, capture_output=True, text=True, check=True).stderr


def compiled(
    kernel: Any, shape: str, warps: int, registers: int | None = None, pool: str = "fp32", **constants: Any
) -> Compiled:
    """Compile one kernel; pointers and strides count as multiples of 16, as an allocator gives them."""
    signature = _signature(kernel, constants, pool)
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in STRIDES]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    language = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    source = language(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False, "maxnreg": registers}
    result = triton.compile(source, target=TARGET, options=options)
    ptx = result.asm["ptx"]
    said = _ptxas(ptx)
    found = re.search(r"Used (\d+) registers", said)
    before_products = re.split(r"wgmma\.mma_async|mma\.sync", ptx)[0]
    first, *later = re.split(r"\bbar\.(?:warp\.)?sync", before_products)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    return Compiled(
        kernel=kernel.__name__,
        shape=shape,
        warps=warps,
        registers=int(found.group(1)) if found else -1,
        spill_bytes=sum(map(int, spills)),
        shared_bytes=result.metadata.shared,
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        mma=len(re.findall(r"mma\.sync\.aligned", ptx)),
        fused=len(re.findall(r"\bfma\.rn\.f32", ptx)),
        async_copies=len(re.findall(r"cp\.async\.c[ag]", ptx)),
        atomics=len(re.findall(r"\b(?:atom|red)\.(?:global|shared)", ptx)),
        barriers=len(re.findall(r"\bbar\.sync", ptx)),
        serialised=len(re.findall(r"wgmma\.mma_async instructions are serialized", said)),
        late_loads=sum(len(re.findall(r"ld\.global", part)) for part in later),
        loads_behind_stores=len(
            re.findall(r"ld\.global", first[first.find("st.global") :] if "st.global" in first else "")
        ),
    )


def _recur(values: int, warps: int, stages: int) -> Compiled:
    return compiled(recur_kernel, f"BV={values} ST={stages}", warps, H=HEADS, BV=values, STAGES=stages)


def _read(values: int, warps: int, registers: int | None = None, pool: str = "fp32") -> Compiled:
    shape = f"BV={values} {pool}"
    return compiled(read_kernel, shape, warps, registers, pool, H=HEADS, BV=values, OF_SLOTS=True, EARLY=True)


def _hopper(stages: int) -> Compiled:
    shape = f"BV={HOPPER_VALUES} ST={stages}"
    return compiled(hopper_recur_kernel, shape, HOPPER_WARPS, H=HEADS, BV=HOPPER_VALUES, STAGES=stages)


def _rows(kernel: Any, warps: int, registers: int | None = None, **constants: Any) -> list[Compiled]:
    """Bounded with one reference, softplus with two."""
    gates: list[dict[str, Any]] = [{"BOUNDED": not two, "TWO_REFERENCES": two} for two in (False, True)]
    return [
        compiled(kernel, f"TWO={gate['TWO_REFERENCES']}", warps, registers, H=HEADS, **gate, **constants)
        for gate in gates
    ]


def pinned(shapes: Shapes = PINNED) -> list[Compiled]:
    """Every kernel as launch.py launches it on an H200, and recur.py's, for other GPUs."""
    return [
        compiled(values_kernel, "", shapes.prepare_warps, H=HEADS),
        *_rows(
            prepare_kernel,
            shapes.prepare_warps,
            shapes.prepare_registers,
            UNROLL=shapes.prepare_unroll,
            KEYS=shapes.prepare_keys,
        ),
        *_rows(step_kernel, shapes.step_warps, EARLY=True, KEYS=shapes.step_keys),
        _read(shapes.read_values, shapes.read_warps, shapes.read_registers),
        _read(shapes.read_values, shapes.read_warps, BF16_REGISTERS, "bf16"),
        _hopper(shapes.hopper_stages),
        _recur(shapes.recur_values, shapes.recur_warps, shapes.recur_stages),
        compiled(keep_kernel, "", 4, H=HEADS),
    ]


def others() -> list[Compiled]:
    """Shapes that a tuning session would try."""
    return [
        *_rows(prepare_kernel, 2, UNROLL=2, KEYS=32),
        *_rows(step_kernel, 2, EARLY=True, KEYS=128),
        *(_read(*shape) for shape in ((16, 1), (32, 1), (32, 2), (32, 4), (64, 2), (128, 4), (128, 8))),
        *(_recur(*shape) for shape in ((32, 2, 3), (32, 1, 3), (32, 4, 3), (64, 4, 2), (64, 4, 4), (128, 8, 3))),
    ]


def main() -> None:
    results = pinned() + (others() if "all" in sys.argv[1:] else [])
    for row in results:
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
