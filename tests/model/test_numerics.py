"""The numerics id changes with everything that may change a bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from forkpoint.model.layout import StateDtypes
from forkpoint.model.numerics import numerics_facts, numerics_id, source_files, sources_digest


@pytest.fixture(autouse=True)
def threads_are_put_back() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_the_id_is_stable_within_a_process() -> None:
    assert numerics_id() == numerics_id()
    assert len(numerics_id()) == 32


def test_the_id_changes_with_the_thread_count() -> None:
    before = numerics_id()
    torch.set_num_threads(1)
    assert numerics_id() != before


def test_the_id_changes_with_the_torch_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_id()
    monkeypatch.setattr(torch, "__version__", "2.13.1")
    assert numerics_id() != before


def test_the_id_changes_with_the_vector_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    before = numerics_id()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER")
    assert numerics_id() != before


def test_the_id_changes_with_each_dtype() -> None:
    ids = {
        numerics_id(),
        numerics_id(dtypes=StateDtypes(kda="bfloat16")),
        numerics_id(dtypes=StateDtypes(activation="bfloat16")),
        numerics_id(compute_dtype=torch.bfloat16),
    }
    assert len(ids) == 4


def test_sources_are_kernels_and_model_without_the_tiny_model() -> None:
    files = source_files()
    assert {"kernels/kda/naive.py", "kernels/elementwise.py", "model/decoder.py", "model/layout.py"} <= set(files)
    assert not any(name.startswith("model/tiny") for name in files)
    assert all(path.is_file() for path in files.values())


def test_the_sources_digest_changes_with_any_byte_or_name(tmp_path: Path) -> None:
    files = {}
    for name in ("a.py", "b.py"):
        files[name] = tmp_path / name
        files[name].write_bytes(b"x = 1\n")
    before = sources_digest(files)
    assert before == sources_digest(dict(reversed(files.items())))
    assert before != sources_digest({"a.py": files["a.py"], "c.py": files["b.py"]})
    files["b.py"].write_bytes(b"x = 2\n")
    assert before != sources_digest(files)


def test_a_changed_source_changes_the_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = numerics_id()
    changed = tmp_path / "naive.py"
    changed.write_bytes(source_files()["kernels/kda/naive.py"].read_bytes() + b"\n")
    files = source_files() | {"kernels/kda/naive.py": changed}
    monkeypatch.setattr("forkpoint.model.numerics.source_files", lambda: files)
    assert numerics_id() != before


def test_the_facts_name_what_the_id_is_made_of() -> None:
    facts = numerics_facts()
    assert facts["torch"] == str(torch.__version__)
    assert facts["threads"] == str(torch.get_num_threads())
    assert facts["mla"] == "absorbed"
    assert facts["tile"].startswith("16 tokens")
