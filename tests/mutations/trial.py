"""Trying a mutation: its test in a process of its own, with the change and without."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Final

import pytest

from tests.mutations.importing import ROOT
from tests.mutations.mutation import Mutation

SECONDS_MAX: Final = 900.0
"""A mistake may make a test hang. That counts as not caught: a test must fail and say why."""
HANGS: Final = -1
"""Stands for the exit code of a process that had to be ended."""


@dataclass(frozen=True)
class Trial:
    """How a test ended. `problem`: pytest's line about the first failure."""

    mutation: Mutation
    code: int
    seconds: float
    problem: str

    @property
    def caught(self) -> bool:
        """A test failed; no error of pytest's own, and none was missing."""
        return self.code == pytest.ExitCode.TESTS_FAILED


def attempt(mutation: Mutation, well: bool = False) -> Trial:
    """Run the mutation's test, with or (`well`) without the change."""
    command = [sys.executable, "-m", "tests.mutations.under", mutation.name, *(["--well"] if well else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(("src", "."))}
    began = time.perf_counter()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS_MAX
        )
    except subprocess.TimeoutExpired:
        return Trial(mutation, HANGS, time.perf_counter() - began, "the test hangs")
    lines = done.stdout.splitlines()
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))] or lines[-1:]
    problem = "\n".join((*failures[:1], *(done.stderr.splitlines()[-1:] if done.returncode > 1 else ())))
    return Trial(mutation, done.returncode, time.perf_counter() - began, problem)
