"""The conformance suite from outside: it runs on a backend that nobody here knows, and finds what is wrong with one."""

import os
import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[2]
BROKEN = """
    from blobs_in_one_file import OneFileBlobs
    from tests.conformance.backends import Backend


    class Forgetful(OneFileBlobs):
        async def replace(self, digest, *pieces):
            await self.put(digest, *pieces)


    def backends():
        return [Backend("forgetful", blobs=lambda folder: Forgetful(folder / "blobs.db"))]
"""
CATALOG = """
    from forkpoint.statestore.memory.catalog import MemoryCatalog
    from tests.conformance.backends import Backend, faulty


    def backends():
        strange = Backend("strange", lambda folder, clock: MemoryCatalog(clock), persistent=False)
        return [strange, faulty(strange)]
"""


def run_suite(entry: str, folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the suite on the backends that `entry` names, from modules in `folder` or examples."""
    path = os.pathsep.join((str(folder), str(ROOT / "examples")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"FORKPOINT_CONFORMANCE": entry, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr


def passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found else 0


def test_the_example_of_a_blob_store_of_ones_own_passes(tmp_path: Path) -> None:
    status, output = run_suite("blobs_in_one_file:backends", tmp_path, "tests/conformance", "-k", "one-file")
    assert status == 0, output
    assert passed(output) >= 14


def test_a_foreign_catalog_is_run_also_behind_faults_and_another_label_is_not(tmp_path: Path) -> None:
    (tmp_path / "strange_catalog.py").write_text(dedent(CATALOG), encoding="utf-8")
    status, output = run_suite("strange_catalog:backends", tmp_path, "tests/conformance/test_log.py", "-k", "strange")
    assert status == 0, output
    assert passed(output) >= 20


def test_a_backend_that_forgets_to_replace_fails_by_name(tmp_path: Path) -> None:
    (tmp_path / "broken_blobs.py").write_text(dedent(BROKEN), encoding="utf-8")
    status, output = run_suite("broken_blobs:backends", tmp_path, "tests/conformance/test_blobs.py", "-k", "forgetful")
    assert status == 1, output
    assert "test_replace_puts_a_frame_over_a_damaged_one_and_where_there_is_none[forgetful]" in output


def test_a_module_that_is_not_there_is_named(tmp_path: Path) -> None:
    status, output = run_suite("no_such_module:backends", tmp_path, "tests/conformance/test_blobs.py", "-k", "nothing")
    assert status != 0
    assert "No module named 'no_such_module'" in output
