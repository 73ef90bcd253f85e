"""The numerics id: a digest over everything that may change a bit of a session's state.

Two processes with the same id compute equal bits for equal tokens; a manifest lists the ids its bytes passed through.
"""

import hashlib
import importlib.metadata
import json
import platform
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import torch

from forkpoint.limits import PAGE_TOKENS, SPLIT_TOKENS, TILE_TOKENS
from forkpoint.model.layout import StateDtypes

MLA_MODE: Final = "absorbed"
TENSOR_PARALLEL_SIZE: Final = 1
ID_BYTES: Final = 16
"""An id is 32 hexadecimal digits: it only has to differ between the few builds a store ever meets."""


def source_files() -> dict[str, Path]:
    """Python files that compute: all of kernels/, and model/ itself without its sub-folders (the tiny model trains)."""
    files: dict[str, Path] = {}
    for package, pattern in (("kernels", "**/*.py"), ("model", "*.py")):
        spec = find_spec(f"forkpoint.{package}")
        for folder in (spec.submodule_search_locations or []) if spec else []:
            for path in Path(folder).glob(pattern):
                files[f"{package}/{path.relative_to(folder).as_posix()}"] = path
    return dict(sorted(files.items()))


def sources_digest(files: dict[str, Path] | None = None) -> str:
    """Digest over names and bytes of the files, by default `source_files()`."""
    digest = hashlib.blake2b(digest_size=ID_BYTES)
    for name, path in sorted((source_files() if files is None else files).items()):
        for field in (name.encode(), path.read_bytes()):
            digest.update(len(field).to_bytes(8, "little"))
            digest.update(field)
    return digest.hexdigest()


def device_facts(device: torch.device) -> dict[str, str]:
    """Architecture of the device: for a CPU its vector capability and the thread count, for a GPU its capability."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return {
            "device": f"cuda sm_{major}{minor} {torch.cuda.get_device_name(device)}",
            "cuda": str(torch.version.cuda),
        }
    return {
        "device": f"{device.type} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "threads": str(torch.get_num_threads()),
    }


def numerics_facts(
    device: torch.device | str = "cpu",
    dtypes: StateDtypes | None = None,
    compute_dtype: torch.dtype = torch.float32,
    kernels: str = "torch",
) -> dict[str, str]:
    """What the numerics id is a digest of, by name; for `forkpoint doctor` and for error messages."""
    dtypes = dtypes or StateDtypes()
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "sources": sources_digest(),
        "torch": str(torch.__version__),
        "triton": triton,
        "kernels": kernels,
        **device_facts(torch.device(device)),
        "dtypes": f"compute {str(compute_dtype).removeprefix('torch.')}, kda {dtypes.kda}, "
        f"activation {dtypes.activation}, open tile {dtypes.opened}",
        "tensor_parallel": str(TENSOR_PARALLEL_SIZE),
        "tile": f"{TILE_TOKENS} tokens, page {PAGE_TOKENS}, split {SPLIT_TOKENS}",
        "mla": MLA_MODE,
    }


def numerics_id(
    device: torch.device | str = "cpu",
    dtypes: StateDtypes | None = None,
    compute_dtype: torch.dtype = torch.float32,
    kernels: str = "torch",
) -> str:
    """The numerics id of this process on `device`: 32 hexadecimal digits."""
    facts = numerics_facts(device, dtypes, compute_dtype, kernels)
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=ID_BYTES).hexdigest()
