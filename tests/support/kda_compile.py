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

from forkpoint.kernels.kda.triton.decode import decode_kernel, factor_kernel, read_kernel
from forkpoint.kernels.kda.triton.launch import PINNED, Shapes
from forkpoint.kernels.kda.triton.prepare import prepare_kernel
from forkpoint.kernels.kda.triton.recur import recur_kernel
from forkpoint.kernels.kda.triton.rows import keep_kernel, row_kernel

TARGET = GPUTarget("cuda", 90, 32)
INT32 = {"facts", "tiles", "sequences", "g_new", "g_open", "g_out"}
FP32 = {"weight", "A_log", "dt_bias", "beta_out", "beta_new", "beta_open", "decay_in", "decay_out", "checkpoints", "S"}
SCALARS = dict.fromkeys(("count", "single", "x_step", "z_step", "x_stride", "b_stride"), "i32") | {
    "lower_bound": "fp32",
    "scale": "fp32",
}
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
    fma_products: bool
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


def compiled(kernel: Any, shape: str, warps: int, **constants: Any) -> Compiled:
    """Compile one kernel; pointers and strides count as multiples of 16, as an allocator gives them."""
    signature = _signature(kernel, constants)
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind.startswith("*")]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    result = triton.compile(source, target=TARGET, options={"num_warps": warps, "enable_fp_fusion": False})
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
        fma_products=bool(re.search(r"\bfma\.rn\.f32", ptx)),
        async_copies=len(re.findall(r"cp\.async\.c[ag]", ptx)),
        atomics=len(re.findall(r"\b(?:atom|red)\.(?:global|shared)", ptx)),
        barriers=len(re.findall(r"\bbar\.sync", ptx)),
    )


def pinned(shapes: Shapes = PINNED) -> list[Compiled]:
    """Every kernel as launch.py launches it."""
    rows: dict[str, Any] = {"H": HEADS, "BR": shapes.row_block}
    out = [
        compiled(row_kernel, f"BOUNDED={bounded}", shapes.row_warps, BOUNDED=bounded, **rows)
        for bounded in (True, False)
    ]
    out.append(compiled(keep_kernel, "", 4, H=HEADS, BOUNDED=True))
    for two in (False, True):
        name = f"TWO={two}"
        out.append(compiled(prepare_kernel, name, shapes.prepare_warps, H=HEADS, BOUNDED=not two, TWO_REFERENCES=two))
        out.append(compiled(factor_kernel, name, shapes.factor_warps, H=HEADS, TWO_REFERENCES=two))
        blocks = f"BV={shapes.decode_values} {name}"
        fused: dict[str, Any] = {"H": HEADS, "BV": shapes.decode_values, "TWO_REFERENCES": two}
        out.append(compiled(decode_kernel, blocks, shapes.decode_warps, **fused))
    out.append(
        compiled(read_kernel, f"BV={shapes.decode_values}", shapes.decode_warps, H=HEADS, BV=shapes.decode_values)
    )
    out.append(
        compiled(
            recur_kernel,
            f"BV={shapes.recur_values} ST={shapes.recur_stages}",
            shapes.recur_warps,
            H=HEADS,
            BV=shapes.recur_values,
            STAGES=shapes.recur_stages,
        )
    )
    return out


def others() -> list[Compiled]:
    """Shapes that a tuning session would try."""
    out = [
        compiled(prepare_kernel, f"TWO={two}", warps, H=HEADS, BOUNDED=not two, TWO_REFERENCES=two)
        for warps in (1, 4)
        for two in (False, True)
    ]
    for warps in (1, 4):
        out += [compiled(factor_kernel, f"TWO={two}", warps, H=HEADS, TWO_REFERENCES=two) for two in (False, True)]
    for values, warps in ((16, 1), (32, 1), (32, 2), (32, 4), (64, 2), (128, 4), (128, 8)):
        out.append(compiled(read_kernel, f"BV={values}", warps, H=HEADS, BV=values))
    for values, warps in ((32, 4), (64, 4), (128, 8)):
        for two in (False, True):
            out.append(compiled(decode_kernel, f"BV={values} TWO={two}", warps, H=HEADS, BV=values, TWO_REFERENCES=two))
    for values, warps, stages in ((32, 2, 3), (32, 4, 3), (64, 4, 2), (64, 4, 4), (128, 8, 3)):
        out.append(compiled(recur_kernel, f"BV={values} ST={stages}", warps, H=HEADS, BV=values, STAGES=stages))
    return out


def main() -> None:
    results = pinned() + (others() if "all" in sys.argv[1:] else [])
    for row in results:
        print(json.dumps(asdict(row)), flush=True)


if __name__ == "__main__":
    main()
