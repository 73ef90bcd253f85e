"""Loading a model folder against reading its files: `python -m benchmarks.loading [FOLDER] [--device cuda]`.

Without a folder it writes one of Kimi Linear's geometry, cut to 1.5 GB. Cold: the files are dropped from the page
cache first, where the kernel lets go of them. Each load runs in a process of its own, which tells its peak of memory.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from benchmarks.record import Measurement, write
from benchmarks.serving.disk import forget, weight_files
from forkpoint.model.checkpoint import Checkpoint
from forkpoint.model.config import ModelConfig
from forkpoint.model.decoder import HybridDecoder
from forkpoint.model.digest import DigestedTensors, model_digest
from forkpoint.model.geometry_sizes import GeometrySizes, sized_config
from forkpoint.model.random_folder import RandomFolder

BUFFER_BYTES: Final = 8 << 20
SIZES: Final = GeometrySizes(layers=5, ffn=512, experts=32, vocab=16384)


def read(folder: Path) -> None:
    """All bytes of a folder's tensors, into one buffer."""
    buffer = bytearray(BUFFER_BYTES)
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def through(folder: Path, config: ModelConfig, digest: bool) -> None:
    """What a load costs the host of a device: each tensor mapped, hashed if asked to, and copied once as it is."""
    source = Checkpoint(folder)
    tensors = DigestedTensors(source) if digest else source
    buffer = torch.empty(max(source.spec(name).nbytes for name in source), dtype=torch.uint8)
    for name in source:
        data = tensors[name].reshape(-1).view(torch.uint8)
        buffer[: data.numel()].copy_(data)
    if isinstance(tensors, DigestedTensors):
        tensors.model_digest(config)


def load(folder: Path, device: str, digest: bool) -> dict[str, float]:
    """Seconds; and bytes of this process at its peak, beyond what it had before and what the decoder keeps on a CPU."""
    tensors = Checkpoint(folder)
    config = ModelConfig.from_folder(folder)
    torch.empty(0, device=device)
    before, began = memory("VmRSS"), time.perf_counter()
    if digest:
        passed = DigestedTensors(tensors)
        decoder = HybridDecoder(config, passed, device)
        passed.model_digest(config)
    else:
        decoder = HybridDecoder(config, tensors, device)
    if decoder.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "beyond": memory("VmHWM") - before - kept_on_cpu()}


def memory(field: str) -> int:
    """Bytes of this process, now (VmRSS) or at its peak since it began (VmHWM; ru_maxrss counts its parent's too)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def kept_on_cpu() -> int:
    """Bytes of all tensors that live."""
    storages = [thing.untyped_storage() for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.device.type == "cpu"}.values())


def in_process(folder: Path, device: str, digest: bool) -> dict[str, float]:
    """`load` in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.loading", str(folder), "--device", device, "--one", str(int(digest))]
    # As `forkpoint serve` has it: threads that wait sleep. torch reads this when it is imported.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def figures(folder: Path, device: str, repeats: int) -> list[Measurement]:
    """The best of `repeats`, cached and cold."""
    config, total = ModelConfig.from_folder(folder), DigestedTensors(Checkpoint(folder)).total_bytes
    rows: list[Measurement] = []

    def timed(act: Callable[[], object]) -> float:
        began = time.perf_counter()
        act()
        return time.perf_counter() - began

    runs: dict[str, Callable[[], float]] = {
        "read": lambda: timed(lambda: read(folder)),
        "digest": lambda: timed(lambda: model_digest(config, Checkpoint(folder))),
        "map and copy": lambda: timed(lambda: through(folder, config, False)),
        "map, hash and copy": lambda: timed(lambda: through(folder, config, True)),
        "load without digest": lambda: in_process(folder, device, False)["seconds"],
        "load": lambda: in_process(folder, device, True)["seconds"],
    }
    for cold in (False, True):
        case = f"{total / 1e9:.2f} GB to {device}, {'cold' if cold else 'cached'}"
        seconds: dict[str, float] = {}
        for _ in range(repeats):
            for name, run in runs.items():
                forget(weight_files(folder)) if cold else read(folder)
                seconds[name] = min(seconds.get(name, float("inf")), run())
        rate = {name: total / 1e6 / found for name, found in seconds.items()}
        rows += [Measurement(case, name, "MB/s", rate[name], "read", rate["read"]) for name in rate]
    beyond = in_process(folder, device, True)["beyond"]
    return [*rows, Measurement(f"{total / 1e9:.2f} GB to {device}", "peak memory beyond the model", "bytes", beyond)]


def main() -> None:
    """Measure and write benchmarks/results/loading.jsonl, or with --out elsewhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="folder of the result file")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(load(arguments.folder, arguments.device, bool(arguments.one))))
        return
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder
        if folder is None:
            folder = Path(made) / "model"
            RandomFolder(sized_config("kimi-linear", SIZES)).write(folder)
        rows = figures(folder, arguments.device, arguments.repeats)
    print(write("loading", rows, *([arguments.out] if arguments.out else [])))


if __name__ == "__main__":
    main()
