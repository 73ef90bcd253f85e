"""The oracles, run: `python -m tests.oracles --venv DIR` compares ours with mlx-lm's and transformers' logits.

mlx-lm lives in an environment of its own, made at DIR if it isn't there. `--write` makes the golden logits anew.
"""

import argparse
import importlib.metadata
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Final

from safetensors.torch import load_file
from torch import Tensor

from tests.oracles.folders import published_logits, write_published
from tests.oracles.golden import ORACLES, Golden, agrees
from tests.oracles.models import OracleModel, oracle_model
from tests.oracles.with_transformers import transformers_logits
from tests.support.distance import distance
from tests.support.reference_model import reference_logits

MLX_LM: Final = "0.32.2"
MLX_PACKAGES: Final = ("mlx[cpu]==0.32.4", f"mlx-lm=={MLX_LM}")


def mlx_logits(environment: Path, folder: Path, ids: list[int]) -> Tensor:
    """Logits [T, vocab] fp32 of mlx-lm, in its environment, which is made first if need be."""
    python = environment / "bin" / "python"
    if not python.exists():
        venv.create(environment, with_pip=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *MLX_PACKAGES], check=True)
    script, out = Path(__file__).with_name("with_mlx.py"), folder / "logits.safetensors"
    subprocess.run([python, script, folder, out, *map(str, ids)], check=True)
    return load_file(out)["logits"]


def run(name: str, oracle: str, environment: Path) -> tuple[Golden, OracleModel, Path]:
    """One model by one implementation, and the folder that it read."""
    model = oracle_model(name)
    folder = write_published(Path(tempfile.mkdtemp()) / name, model)
    if oracle == "mlx-lm":
        logits, version = mlx_logits(environment, folder, model.token_ids), MLX_LM
    else:
        logits = transformers_logits(folder, model.token_ids)
        version = importlib.metadata.version("transformers")
    return Golden(f"{oracle} {version}", model.digest(), model.token_ids, logits), model, folder


def main() -> int:
    """Print the distances; 1 when one is too large."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True, help="environment of mlx-lm")
    parser.add_argument("--write", action="store_true", help="make the golden logits anew")
    arguments = parser.parse_args()
    agree = True
    for name, oracle in ORACLES:
        live, model, folder = run(name, oracle, arguments.venv)
        if arguments.write:
            live.write(name, oracle)
        exact = reference_logits(model.config.raw, model.weights, model.token_ids)
        for what, logits in (
            ("fp64 reference", exact),
            ("ours, fp32", published_logits(folder, model.token_ids)),
            ("golden", Golden.read(name, oracle).logits),
        ):
            far = distance(logits, live.logits)
            agree &= agrees(name, far)
            print(f"{name} by {live.implementation}, {what}: {far}", flush=True)
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
