"""Compiles kernels for sm_90 without a GPU and reads what came out: registers, spills, shared memory, instructions.

A process whose triton interprets cannot compile, so tests run this in one of their own: `reports` starts it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
CAPABILITY: Final = 90
WARP: Final = 32


@dataclass(frozen=True)
class Probe:
    """One kernel in one specialisation. `types` are Triton's ("*bf16", "i32", "fp32", "tensordesc<bf16[64,64]>")."""

    name: str
    kernel: str
    """module:function"""
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int = 3
    unaligned: tuple[str, ...] = ()
    """Arguments that are not multiples of 16; all others are."""


@dataclass(frozen=True)
class Report:
    """What the compiler made of a probe. Bytes of spills are stores and loads together."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: int
    mma: int
    atomics: int
    tma: int
    fp32_fma: int
    wide: int
    """Loads and stores of 16 bytes a thread in global memory."""
    narrow: int
    """Loads and stores of less, of one value too."""


def compile_probe(probe: Probe) -> Report:
    """Compiles one probe with the bundled ptxas."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, function = probe.kernel.split(":")
    kernel = getattr(importlib.import_module(module), function)
    names = kernel.arg_names
    signature = {name: probe.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in probe.constants.items()}
    aligned = {
        (names.index(name),): [["tt.divisibility", 16]]
        for name, kind in probe.types.items()
        if name not in probe.unaligned and (kind.startswith("*") or kind in ("i32", "i64"))
    }
    source = GluonASTSource if kernel.is_gluon() else ASTSource
    compiled = triton.compile(
        source(kernel, signature=signature, constexprs=constants, attrs=aligned),
        target=GPUTarget("cuda", CAPABILITY, WARP),
        options={"num_warps": probe.warps, "num_stages": probe.stages, "enable_fp_fusion": False},
    )
    ptx = compiled.asm["ptx"]
    registers, spills = assemble(ptx)
    return Report(
        name=probe.name,
        registers=registers,
        spill_bytes=spills,
        shared_bytes=compiled.metadata.shared,
        wgmma=len(re.findall(r"wgmma\.mma_async", ptx)),
        mma=len(re.findall(r"\bmma\.sync", ptx)),
        atomics=len(re.findall(r"^\s*(?:@\S+\s+)?(?:atom|red)\.(?!async)", ptx, re.MULTILINE)),
        tma=len(re.findall(r"cp\.async\.bulk\.tensor", ptx)),
        fp32_fma=len(re.findall(r"\bfma\.rn(?:\.ftz)?\.f32", ptx)),
        wide=len(re.findall(r"\b(?:ld|st)\.global\.\S*(?:v4\.b32|v2\.b64)", ptx)),
        narrow=len(re.findall(r"\b(?:ld|st)\.global\.(?!\S*(?:v4\.b32|v2\.b64))", ptx)),
    )


def assemble(ptx: str) -> tuple[int, int]:
    """(registers a thread, bytes of spill stores and loads) that ptxas reports."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx, encoding="utf-8")
        call = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", str(source), "-o", str(source) + ".cubin"]
        said = subprocess.run(call, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)
    if registers is None:
        raise RuntimeError(f"ptxas said nothing of registers: {said}")
    return int(registers[1]), sum(map(int, spills))


def reports(probes: Iterable[Probe], cache: Path) -> dict[str, Report]:
    """Compiles probes in a process of their own; `cache` is triton's, so that a home directory is left alone."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TRITON_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_compile"],
        input=json.dumps([asdict(probe) for probe in probes]),
        capture_output=True, text=True, cwd=ROOT, env=environment, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"kernels do not compile:\n{done.stderr[-4000:]}")
    return {row["name"]: Report(**row) for row in json.loads(done.stdout)}


if __name__ == "__main__":
    asked = [Probe(**row) for row in json.loads(sys.stdin.read())]
    print(json.dumps([asdict(compile_probe(probe)) for probe in asked]))
