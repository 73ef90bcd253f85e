"""Generate the protobuf stubs: `python -m tools.stubs [--check]`.

Without arguments the stubs are written beside their .proto files. With --check they are generated into a temporary
folder and compared with the committed ones; the exit status is 1 when any differs.
"""

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORT_ROOT = ROOT / "src"
PROTO_ROOT = IMPORT_ROOT / "forkpoint" / "proto"
SERVICE = re.compile(r"^\s*service\s+\w+", re.MULTILINE)
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def proto_files() -> list[Path]:
    """All .proto files as paths relative to the import root, sorted."""
    folder = PROTO_ROOT.resolve()
    return sorted(Path("forkpoint/proto") / path.relative_to(folder) for path in folder.rglob("*.proto"))


def generate(output: Path) -> None:
    """Run protoc for every file; files with services also get gRPC stubs."""
    site_packages = sysconfig.get_path("purelib")
    environment = dict(os.environ)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}"
    for proto in proto_files():
        arguments = [sys.executable, "-m", "grpc_tools.protoc", "-I", str(IMPORT_ROOT), "-I", site_packages]
        arguments += [f"--python_out={output}", f"--mypy_out={output}"]
        if SERVICE.search((IMPORT_ROOT / proto).read_text()):
            arguments += [f"--grpc_python_out={output}", f"--mypy_grpc_out={output}"]
        subprocess.run([*arguments, str(IMPORT_ROOT / proto)], check=True, env=environment, stderr=subprocess.PIPE)


def stub_files(root: Path) -> dict[str, bytes]:
    """Relative path -> content of every stub under the proto folder of `root`."""
    folder = (root / "forkpoint" / "proto").resolve()
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name.endswith(SUFFIXES)
    }


def differing() -> list[str]:
    """Names of stubs that are stale, missing or left over."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = stub_files(Path(folder))
    committed = stub_files(IMPORT_ROOT)
    return sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))


def main() -> int:
    """Generate, or compare with --check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare only; exit 1 when a stub is stale")
    arguments = parser.parse_args()
    try:
        if arguments.check:
            stale = differing()
            for name in stale:
                print(f"proto/{name} is stale: run python -m tools.stubs")
            return 1 if stale else 0
        generate(IMPORT_ROOT)
    except subprocess.CalledProcessError as error:
        print(error.stderr.decode(errors="replace"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
