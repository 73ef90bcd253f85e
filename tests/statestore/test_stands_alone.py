"""The store is of use to whoever has nothing else of ours: it imports and works without torch, grpc and the service."""

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "statestore.md"
NOT_NEEDED = ("torch", "triton", "numpy", "grpc", "grpc_status", "safetensors", "tokenizers", "rich")
OTHER_ROOMS = ("server", "client", "cli", "model", "kernels")


def test_the_example_runs_in_a_process_that_lacks_everything_else(tmp_path: Path) -> None:
    program = dedent(
        """
        import runpy, sys
        _, refused, *sys.argv = sys.argv
        for name in refused.split(","):
            sys.modules[name] = None  # any import of it now raises
        runpy.run_path(sys.argv[0], run_name="__main__")
        """
    )
    refused = ",".join([*NOT_NEEDED, *(f"forkpoint.{room}" for room in OTHER_ROOMS)])
    example = str(ROOT / "examples" / "store_on_its_own.py")
    result = subprocess.run(
        [sys.executable, "-c", program, refused, example, str(tmp_path)],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "0 findings" in result.stdout


def test_the_names_of_the_guide_are_where_it_says() -> None:
    rows = re.findall(r"^\| (`.+`.*?) \| `(forkpoint[\w.]+)` \|", GUIDE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rows) >= 9
    for names, module in rows:
        for name in re.findall(r"`(\w+)`", names):
            assert hasattr(import_module(module), name), f"{module} has no {name}"


def test_every_module_that_the_guide_names_is_there() -> None:
    for module in sorted(set(re.findall(r"`(forkpoint\.[a-z_.]+)`", GUIDE.read_text(encoding="utf-8")))):
        import_module(module)
