"""The architecture as data, and the test that holds it: who may import whom, sizes, and banned calls."""

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.architecture import (
    ROOT,
    Ban,
    Room,
    Source,
    banned_names,
    banned_statements,
    import_problems,
    names_of_tests,
    size_problems,
    sources,
)

LINKED = frozenset({"kernels", "model", "statestore", "proto", "client", "cli", "server"})
PRODUCT = (*sorted(LINKED), "src/forkpoint")
AROUND = ("tests", "tools", "benchmarks", "examples")
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70


def room(*rooms: str, third: tuple[str, ...] = ()) -> Room:
    """One row of the matrix."""
    return Room(frozenset(rooms), frozenset(third))


ROOMS = {
    "src/forkpoint": room(),
    "proto": room(third=("grpc", "google")),
    "kernels": room(third=("torch", "triton")),
    "model": room("kernels", third=("torch", "safetensors", "tiktoken", "blake3")),
    "model/tiny/train.py": room("model", third=("torch", "safetensors", "fla", "triton")),
    "statestore": room("proto", third=("apsw", "redis", "zstandard", "blake3", "google")),
    "server/engine": room("model", "kernels", third=("torch",)),
    "server/scheduler": room("server/engine/batch"),
    "server/session": room(
        "statestore",
        "server/scheduler",
        "server/engine/base",
        "server/engine/batch",
        "server/engine/errors",
        third=("blake3",),
    ),
    "server/rpc": room(
        *("server/session", "statestore/records", "statestore/gcreport", "proto"),
        third=("grpc", "grpc_health", "grpc_reflection", "google"),
    ),
    "server/app.py": room("server", "statestore", "model", third=("torch", "grpc")),
    "server/main.py": room("server"),
    "client": room("proto", third=("grpc", "grpc_health", "google")),
    "cli": room(
        *("client", "model/config", "model/geometries", "model/plan", "statestore/check", "statestore/open"),
        *("model/published", "model/geometry_sizes", "model/weight_sizes", "model/device_fit"),
        *("model/random_folder", "model/folder_check"),
        *("statestore/gc", "statestore/gcreport", "statestore/retention"),
        "server/main",
        third=("rich",),
    ),
    "cli/demo": room("cli", "client", "model/tiny/data", "statestore/open", third=("rich",)),
}
"""Folder (or one file) -> what it may import. The longest key that fits a file is its room."""

BANS = {
    "time.time": Ban("take a forkpoint.clock.Clock", ("src/forkpoint/clock.py", "model/tiny/train.py", "benchmarks/")),
    "time.time_ns": Ban("take a forkpoint.clock.Clock", ("src/forkpoint/clock.py",)),
    "time.monotonic": Ban(
        "take a forkpoint.clock.Clock", ("src/forkpoint/clock.py", "tests/", "model/tiny/train.py", "benchmarks/")
    ),
    "time.sleep": Ban("await asyncio.sleep, or wait on an event", ("tests/", "cli/")),
    "datetime.datetime.now": Ban("take Clock.wall_us()"),
    "datetime.datetime.utcnow": Ban("take Clock.wall_us()"),
    "asyncio.ensure_future": Ban("use an asyncio.TaskGroup"),
    "pickle": Ban("use protobuf, JSON or safetensors: pickle runs what it reads"),
    "marshal": Ban("use protobuf or JSON"),
    "shelve": Ban("use the catalog"),
    "torch.load": Ban("use safetensors: torch.load unpickles", ("benchmarks/store/",)),
    "torch.save": Ban("use safetensors.torch.save_file", ("benchmarks/store/",)),
    "os.system": Ban("use subprocess.run with a list"),
}
"""Dotted name -> its replacement, and where it is fine."""

WITHOUT_TORCH = ("statestore", "server.session", "server.scheduler", "server.rpc", "client")
WITHOUT_SERVICES = ("kernels", "model", "server.engine")

_OWN_PATHS = re.compile(r"(?<![\w.<{$*])/(?:work|root|home/\w+|Users/\w+|mnt/\w+)/|\.\./sha" r"red\b|\.lib" r"rary\b")
_PACKAGE_HOSTS = re.compile(
    r"py" r"pi\.org|python" r"hosted\.org|download\.py" r"torch\.org|anac" r"onda\.", re.IGNORECASE
)
_PRIVATE_ADDRESSES = re.compile(r"(?<![\d.])(?:10|192\.168|172\.(?:1[6-9]|2\d|3[01]))(?:\.\d{1,3}){2,3}(?![\d.])")
_TEXT_FILES = {".py", ".pyi", ".md", ".toml", ".yaml", ".yml", ".txt", ".proto", ".json", ".svg", ".cpu", ".cuda", ""}
_ROW = re.compile(r"^\|(?P<promise>[^|]+)\|\s*tested\s*\|(?P<tests>[^|]+)\|", re.MULTILINE)
_TEST_REF = re.compile(r"`(?P<path>tests/[\w/.-]+)(?:::(?P<name>\w+))?`")


@pytest.fixture(scope="module")
def product() -> list[Source]:
    return list(sources(PRODUCT))


@pytest.fixture(scope="module")
def everything(product: list[Source]) -> list[Source]:
    return [*product, *sources(AROUND)]


def tracked_text() -> list[Path]:
    """Text files of the repository: those that git knows or would add, else (an unpacked archive) all."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listing.returncode == 0:
        paths = [ROOT / name for name in listing.stdout.decode().split("\0") if name]
    else:
        paths = [p for p in ROOT.rglob("*") if not any(part.startswith(".venv") for part in p.parts)]
    return [path for path in paths if path.suffix in _TEXT_FILES and path.is_file() and not path.is_symlink()]


def test_every_import_is_in_the_matrix(product: list[Source]) -> None:
    assert [problem for source in product for problem in import_problems(source, ROOMS, LINKED)] == []


def test_banned_calls_are_not_used(everything: list[Source]) -> None:
    assert [problem for source in everything for problem in banned_names(source, BANS)] == []


def test_no_error_is_swallowed_and_nothing_is_left_for_later(everything: list[Source]) -> None:
    assert [problem for source in everything for problem in banned_statements(source)] == []


def test_files_and_functions_stay_small(everything: list[Source]) -> None:
    problems = [p for source in everything for p in size_problems(source, FILE_LINES_MAX, FUNCTION_LINES_MAX)]
    assert problems == []


def test_linked_folders_are_namespace_packages_behind_relative_links() -> None:
    for folder in sorted(LINKED):
        link = ROOT / "src" / "forkpoint" / folder
        assert link.is_symlink() and str(link.readlink()) == f"../../{folder}", f"src/forkpoint/{folder} is no link"
        assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py would shadow the link's namespace"


def test_no_text_names_a_machine_path_or_a_package_host() -> None:
    problems = []
    for path in tracked_text():
        text = path.read_text(encoding="utf-8", errors="replace")
        for pattern in (_OWN_PATHS, _PACKAGE_HOSTS, _PRIVATE_ADDRESSES):
            if match := pattern.search(text):
                line = text.count("\n", 0, match.start()) + 1
                problems.append(f"{path.relative_to(ROOT)}:{line}: {match.group()}")
    assert problems == []


@pytest.mark.parametrize(
    ("packages", "refused"),
    [
        (WITHOUT_TORCH, ("torch", "transformers", "triton")),
        (WITHOUT_SERVICES, ("grpc", "redis", "apsw", "blake3", "zstandard")),
        (("statestore", "server.session", "server.scheduler"), ("grpc",)),
    ],
    ids=["torch", "services", "grpc"],
)
def test_rooms_import_in_a_process_that_lacks_what_they_may_not_use(
    packages: tuple[str, ...], refused: tuple[str, ...]
) -> None:
    modules = []
    for package in packages:
        folder = package.replace(".", "/")
        for source in sources([folder]):
            if source.path not in ROOMS and "__main__" not in source.path:
                modules.append(
                    "forkpoint." + source.path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
                )
    program = dedent(
        """
        import importlib, sys
        refused, modules = sys.argv[1].split(","), sys.argv[2].split(",")
        for name in refused:
            sys.modules[name] = None  # any import of it now raises
        for name in modules:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                # Kernels in Triton import only where it is; the matrix reads their imports like all others.
                if (error.name or "").split(".")[0] != "triton" or "triton" in refused:
                    raise
        """
    )
    result = subprocess.run(
        [sys.executable, "-c", program, ",".join(refused), ",".join(modules)],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


def referenced_tests(text: str) -> list[tuple[str, str | None]]:
    """(path, test name or None) of every `tests/…` in backticks."""
    return [(m["path"], m["name"]) for m in _TEST_REF.finditer(text)]


def missing_tests(references: list[tuple[str, str | None]]) -> list[str]:
    """References to files or test functions that don't exist."""
    problems = []
    for path, name in references:
        file = ROOT / path
        if not file.exists():
            problems.append(f"{path} does not exist")
        elif name is not None and name not in names_of_tests(file):
            problems.append(f"{path} has no {name}")
    return problems


def test_every_promise_that_the_readme_calls_tested_names_a_test_that_exists() -> None:
    rows = list(_ROW.finditer((ROOT / "README.md").read_text(encoding="utf-8")))
    assert len(rows) >= 5, "README.md lost its table of promises"
    for row in rows:
        assert referenced_tests(row["tests"]), f"no test is named for: {row['promise'].strip()}"
        assert missing_tests(referenced_tests(row["tests"])) == []


@pytest.mark.parametrize("page", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/cases.md"])
def test_tests_named_in_the_documents_exist(page: str) -> None:
    assert missing_tests(referenced_tests((ROOT / page).read_text(encoding="utf-8"))) == []


def source(path: str, text: str) -> Source:
    return Source.of(path, dedent(text))


@pytest.mark.parametrize(
    ("path", "text", "finding"),
    [
        ("statestore/x.py", "import torch", "statestore may not import the third party torch"),
        ("server/session/x.py", "def f():\n    import grpc", "may not import the third party grpc"),
        ("kernels/x.py", "from forkpoint.model.state import StateLayout", "kernels may not import model/state"),
        (
            "server/session/x.py",
            "from forkpoint.server.engine.runner import Runner",
            "may not import server/engine/runner",
        ),
        ("src/forkpoint/x.py", "from forkpoint.kernels.norm import naive", "may not import kernels/norm"),
        ("client/x.py", "from .stream import Stream", "relative import"),
        ("elsewhere/x.py", "import os", "in no room"),
        ("cli/x.py", "import kernels", "third party kernels"),
    ],
)
def test_the_import_scan_finds(path: str, text: str, finding: str) -> None:
    problems = list(import_problems(source(path, text), ROOMS, LINKED))
    assert len(problems) == 1 and finding in problems[0]


def test_the_import_scan_allows_what_the_matrix_allows() -> None:
    allowed = source(
        "server/session/x.py",
        """
        import asyncio
        from forkpoint.errors import NotFoundError
        from forkpoint.server.engine.base import Engine
        from forkpoint.server.session.api import Input
        from forkpoint.statestore.base import Catalog
        """,
    )
    assert list(import_problems(allowed, ROOMS, LINKED)) == []


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.time()",
        "import time as t\nt.time()",
        "from time import time as now\nnow()",
        "import pickle",
        "import torch\ntorch.load('x')",
        "import datetime\ndatetime.datetime.now()",
    ],
)
def test_the_ban_scan_finds(text: str) -> None:
    problems = list(banned_names(source("model/x.py", text), BANS))
    assert problems and all("is banned: " in problem for problem in problems)


def test_the_ban_scan_leaves_the_clock_alone() -> None:
    assert list(banned_names(source("src/forkpoint/clock.py", "import time\ntime.time_ns()"), BANS)) == []
    assert list(banned_names(source("model/x.py", "time = object()\nclock.time()"), BANS)) == []


@pytest.mark.parametrize(
    "text",
    [
        "try:\n    f()\nexcept:\n    raise",
        "try:\n    f()\nexcept Exception:\n    pass",
        "def f():\n    raise NotImplementedError",
        "import asyncio\nasyncio.create_task(f())",
        "x = 1  # TODO",
    ],
)
def test_the_statement_scan_finds(text: str) -> None:
    assert len(list(banned_statements(source("server/x.py", text)))) == 1


def test_the_statement_scan_allows_owned_tasks() -> None:
    owned = """
    import asyncio
    async def f(group):
        group.create_task(g())
        # owner: stop() awaits it
        asyncio.create_task(h())
    """
    assert list(banned_statements(source("server/x.py", owned))) == []


def test_the_size_scan_finds() -> None:
    long = source("server/x.py", "def f():\n" + "    g()\n" * 8 + "\n" * 4 + "x = 1")
    problems = list(size_problems(long, 10, 8))
    assert len(problems) == 2 and "at most 10" in problems[0] and "f has 9 lines" in problems[1]


def test_the_promise_table_scan_finds_a_test_that_does_not_exist() -> None:
    row = "| a promise | tested | `tests/test_architecture.py::test_that_nobody_wrote`, `tests/nowhere.py` |"
    found = [missing_tests(referenced_tests(match["tests"])) for match in _ROW.finditer(row)]
    assert found == [["tests/test_architecture.py has no test_that_nobody_wrote", "tests/nowhere.py does not exist"]]
