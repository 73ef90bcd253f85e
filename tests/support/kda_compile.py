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

from forkpoint.kernels.kda.triton.decode import read_kernel, step_kernel
from forkpoint.kernels.kda.triton.launch import PINNED, Shapes
from forkpoint.kernels.kda.triton.prepare import prepare_kernel, values_kernel
from forkpoint.kernels.kda.triton.recur import recur_kernel

TARGET = GPUTarget("cuda", 90, 32)
INT32 = {"reference_out", "facts", "tiles", "sequences", "total_open", "reference_open", "total_kept", "reference_kept"}
FP32 = {"weight", "A_log", "dt_bias", "beta_open", "decay_in", "decay_out", "checkpoints", "S"}
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


def _signature(kernel: Any, constants: dict[str, Any]) -> dict[str, str]:
    types: dict[str, str] = {}
    for name in kernel.arg_names:
        if name in constants:
            types[name] = "constexpr"
        elif name in SCALARS:
            types[name] = SCALARS[name]
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


def compiled(kernel: Any, shape: str, warps: int, registers: int | None = None, **constants: Any) -> Compiled:
    """Compile one kernel; pointers and strides count as multiples of 16, as an allocator gives them."""
    signature = _signature(kernel, constants)
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in STRIDES]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": warps, "enable_fp_fusion": False, "maxnreg": registers}
    result = triton.compile(source, target=TARGET, options=options)
    ptx = result.asm["ptx"]
    said = _ptxas(ptx)
    found = re.search(r"Used (\d+) registers", said)
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
    )


def _recur(values: int, warps: int, stages: int) -> Compiled:
    return compiled(recur_kernel, f"BV={values} ST={stages}", warps, H=HEADS, BV=values, STAGES=stages)


def _read(values: int, warps: int) -> Compiled:
    return compiled(read_kernel, f"BV={values}", warps, H=HEADS, BV=values, OF_SLOTS=True, EARLY=True)


def _rows(kernel: Any, warps: int, registers: int | None = None, **constants: Any) -> list[Compiled]:
    """Bounded with one reference, softplus with two."""
    gates: list[dict[str, Any]] = [{"BOUNDED": not two, "TWO_REFERENCES": two} for two in (False, True)]
    return [
        compiled(kernel, f"TWO={gate['TWO_REFERENCES']}", warps, registers, H=HEADS, **gate, **constants)
        for gate in gates
    ]


def pinned(shapes: Shapes = PINNED) -> list[Compiled]:
    """Every kernel as launch.py launches it."""
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
        _read(shapes.read_values, shapes.read_warps),
        _recur(shapes.recur_values, shapes.recur_warps, shapes.recur_stages),
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
